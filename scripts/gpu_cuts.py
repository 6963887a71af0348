"""Cuts of products that a warm-up chooses on this card, beside those of the kernels' table, by whole steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from scripts.gpu_shapes import Figures, Part, tree_parents
from specdec import Draft
from specdec.runners import cuts as module
from specdec.step.block import Block
from specdec.step.device_copies import seconds_of

__all__ = ["cuts"]

ROWS = (1, 16, 64)


def cuts(check: Any) -> Iterator[Part]:
    """What is chosen, how long that takes, and what it brings."""
    if check.on_gpu:
        for shape in (check.big, check.small):
            yield shape, partial(chosen, check, shape)


def chosen(check: Any, shape: str) -> Figures:
    """Milliseconds of steps with the table's cuts and with those of a warm-up with nothing kept, and its seconds."""
    target = check.target(shape)
    runner, found = target.runner, dict[str, Any]()
    own = runner._cuts
    with nothing_kept():
        former = {weight: dict(known) for weight, known in own._chosen.items()}
        for known in own._chosen.values():
            known.clear()
        runner._graphs.forget()
        found["table's, ms"] = {rows: step_ms(target, rows, check.device) for rows in ROWS}
        for name in ("choosing", "chosen before"):
            found[f"warm-up, {name}, s"] = seconds_of(lambda: target.warm_up(64), check.device, time.perf_counter)
        found["chosen, ms"] = {rows: step_ms(target, rows, check.device) for rows in ROWS}
        found["cuts"] = runner.cuts()
        own._chosen.update(former)
        runner._graphs.forget()
    return found


@contextmanager
def nothing_kept() -> Iterator[None]:
    """While inside, choices are kept in a folder that is empty at first."""
    former = module.cache_folder
    with TemporaryDirectory() as folder:
        module.cache_folder = lambda: Path(folder)
        try:
            yield
        finally:
            module.cache_folder = former


def step_ms(target: Any, rows: int, device: torch.device) -> float:
    """A recorded step of a binary tree, the median of fifteen."""
    draft = Draft([5] * rows, tree_parents(rows, "binary"))
    with target.active():
        cache = target.new_cache(capacity=200, rows=rows)
        times = [
            seconds_of(lambda: target.forward(Block.of(draft, cache, device)), device, time.perf_counter)
            for _ in range(17)
        ]
    return 1e3 * median(times[2:])
