"""Warming up: on a device that records steps, those of every bucket are run, so that no later one has to record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

from specdec.runners.packed_step import MOST_REPLAYED
from specdec.runners.visibility import bucket
from specdec.step.joining import joined
from specdec.step.step_io import NOTHING, Entering, LayerPlan, StepInput, Wanted
from specdec.target import Target

__all__ = ["warm_up"]

_ROWS = 64  # of several sequences


def warm_up(
    target: Target,
    choose_cuts: Callable[[int], None],
    rows: int,
    *,
    sequences: int,
    taps: Collection[int],
    exit_layer: int | None,
    levels: int,
) -> None:
    """As :meth:`specdec.target.Target.warm_up`; ``choose_cuts``: a function of the most rows of a step."""
    sizes = [1 << power for power in range(bucket(max(rows, levels)).bit_length())]
    caches = [target.new_cache(capacity=1, rows=sizes[-1]) for _ in range(bucket(sequences))]

    def rows_for(count: int, each: int, whole: int, **asked: Any) -> StepInput:
        """The last ``each`` of a chain's ``whole`` rows, for ``count`` sequences; a part is marked as a tree."""
        tree = (range(-1, whole - 1), range(whole)) if each < whole else None
        own = [StepInput.of(cache, [0] * each, tree, first=whole - each, **asked) for cache in caches[:count]]
        return joined(own)

    plan, wanted = LayerPlan(exit_layer), Wanted(hidden=taps)
    with target.active():
        choose_cuts(min(bucket(max(rows, sequences)), MOST_REPLAYED))
        for count, each in itertools.product((1 << power for power in range(len(caches).bit_length())), sizes):
            if count > 1 and each > 1 and count * each > _ROWS:
                continue
            if each <= bucket(rows) and exit_layer is None:
                target.forward(rows_for(count, each, each, wanted=wanted))
            elif each <= bucket(rows):
                early = target.forward(rows_for(count, each, each, plan=plan, wanted=NOTHING)).out
                entering = Entering(exit_layer or 0, early[:each])
                target.forward(rows_for(count, each, each, wanted=wanted, entering=entering))
            for whole in (size for size in sizes if each < size <= bucket(levels or 1)):
                target.forward(rows_for(count, each, whole, plan=plan))
