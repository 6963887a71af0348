"""One text by several processes that torchrun started, on torch.distributed as it stands.

``rows``
    Every process holds the model and runs a share of each step's rows (:mod:`specdec.parallel.rows`).
``tensor``
    Every process holds a share of each weight, by transformers' own plan (:mod:`specdec.parallel.tensor`).

All processes, *ranks*, run the same program: engine, drafter and verification are the same everywhere, and no
rank leads. What they have to agree on is compared as they go, and a difference ends them all.
"""

__all__ = ["PARALLEL"]

PARALLEL = ("off", "rows", "tensor")
