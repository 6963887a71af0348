"""Cost: how long the target's forward takes by its rows, with nothing around it, and what memory alone would allow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from specdec.bench.environment import synchronize
from specdec.block import Block
from specdec.cache import KVCache
from specdec.draft import Draft
from specdec.model import TransformersTarget

__all__ = ["COST_ROWS", "measure_bandwidth", "measure_cost", "weight_bytes"]

COST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_CHUNK = 512


def measure_cost(
    target: TransformersTarget,
    text: Sequence[int],
    rows: Sequence[int] = COST_ROWS,
    *,
    repeats: int = 30,
    backend: str | None = None,
) -> dict[int, float]:
    """Rows -> median seconds of a forward of so many rows after ``text``, logits of every row included.

    All numbers of rows take turns, so that a machine that drifts drifts for all; two rounds warm up. The second of two
    forwards counts, as in decoding the one before has left the weights in the caches. ``backend`` is the attention's,
    the target's own where it is None.
    """
    tokens, backend = list(text), backend or target.backend
    times: dict[int, list[float]] = {count: [] for count in rows}
    with target.active():
        cache = target.new_cache(capacity=len(tokens) + max(rows), rows=max(_CHUNK, *rows))
        _fill(target, cache, tokens, backend)
        for repeat in range(-2, repeats):
            for count in rows:
                draft = Draft.chain([tokens[place % len(tokens)] for place in range(count)])
                began = 0.0
                for _ in range(2):
                    began = perf_counter()
                    target.forward(Block.of(draft, cache, target.device, backend))
                    synchronize(target.device)
                if repeat >= 0:
                    times[count].append(perf_counter() - began)
    return {count: statistics.median(taken) for count, taken in times.items()}


def _fill(target: TransformersTarget, cache: KVCache, tokens: Sequence[int], backend: str) -> None:
    """Run tokens into the cache, in chunks and without logits, inside ``target.active()``."""
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        target.forward(Block(cache, chunk, device=target.device, backend=backend), rows=())
        cache.commit(range(len(chunk)))


def measure_bandwidth(device: torch.device, nbytes: int, repeats: int = 20) -> dict[str, float]:
    """Bytes per second of a device's memory: of copying a tensor of ``nbytes``, of summing it, and the better one."""
    source = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    sink = torch.empty_like(source)
    best: dict[str, float] = {}
    works: tuple[tuple[str, Callable[[], object], int], ...] = (
        ("copy", lambda: sink.copy_(source), 2 * nbytes),
        ("read", lambda: source.sum(), nbytes),
    )
    for name, work, moved in works:
        times = []
        for _ in range(repeats + 2):
            synchronize(device)
            began = perf_counter()
            work()
            synchronize(device)
            times.append(perf_counter() - began)
        best[name] = moved / min(times[2:])
    return {**best, "bytes_per_second": max(best.values())}


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a forward of one row reads: all but an embedding that is not the head too."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(int(weight.nbytes) for weight in model.parameters())
    return total if embedding is head else total - int(embedding.nbytes)
