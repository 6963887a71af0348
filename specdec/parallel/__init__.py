"""Parallel decoding: one text by several processes that torchrun started, with torch.distributed.

``rows``
    Every process holds the model and runs a share of each step's rows (:mod:`specdec.parallel.rows`).
``tensor``
    Every process holds a share of each weight, by transformers' own plan (:mod:`specdec.parallel.tensor`).

All processes (*ranks*) run the same program with the same engine, drafter and verification; no rank leads. Values on
which they must agree are compared, and a difference ends all of them.
"""

__all__ = ["PARALLEL"]

PARALLEL = ("off", "rows", "tensor")
