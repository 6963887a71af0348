"""Cost: how long the target's forward takes by its rows, with nothing around it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter

from specdec.bench.environment import synchronize
from specdec.block import Block
from specdec.cache import KVCache
from specdec.draft import Draft
from specdec.target import TransformersTarget

__all__ = ["COST_ROWS", "fill", "measure_cost"]

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

    All numbers of rows take turns, so that a machine that drifts drifts for all; two rounds warm up. ``backend`` is the
    attention's, the target's own where it is None.
    """
    tokens, backend = list(text), backend or target.backend
    times: dict[int, list[float]] = {count: [] for count in rows}
    with target.active():
        cache = target.new_cache(capacity=len(tokens) + max(rows), rows=max(_CHUNK, *rows))
        fill(target, cache, tokens, backend)
        for repeat in range(-2, repeats):
            for count in rows:
                draft = Draft.chain([tokens[place % len(tokens)] for place in range(count)])
                began = perf_counter()
                target.forward(Block.of(draft, cache, target.device, backend))
                synchronize(target.device)
                if repeat >= 0:
                    times[count].append(perf_counter() - began)
    return {count: statistics.median(taken) for count, taken in times.items()}


def fill(target: TransformersTarget, cache: KVCache, tokens: Sequence[int], backend: str) -> None:
    """Run tokens into the cache, in chunks and without logits, inside ``target.active()``."""
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        target.forward(Block(cache, chunk, device=target.device, backend=backend), rows=())
        cache.commit(range(len(chunk)))
