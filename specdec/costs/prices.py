"""Prices of rows, in tokens: the time that they add, and the tokens that such a time yields of late."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from specdec.costs.curve import CostCurve, Reading
from specdec.costs.live_curve import LiveCosts

__all__ = ["ROW_SECONDS", "UNBATCHED", "BatchLoad", "Prices", "most_worth"]

_BUCKET = 256  # tokens of context for which one reading of the curve serves
_PRIOR_STEPS = 10.0  # plain steps that the first belief about tokens per step counts as
_MEMORY = 0.95  # weight of the past, from one step to the next
ROW_SECONDS = 1e-4  # one of a drafter's fixed_cost_rows


class BatchLoad(NamedTuple):
    """What a sequence shares its forwards with: how many ``sequences``, itself included; the others' ``rows``."""

    sequences: int
    rows: int


UNBATCHED = BatchLoad(1, 0)


def most_worth(gains: Sequence[float], prices: Sequence[float], least: float = 0.0) -> int:
    """How many rows, best first, bring the most over what they cost; none where no number brings more than ``least``.

    Args:
        gains: each row's chance to be accepted, which is what it brings in tokens.
        prices: of 0, 1, ... rows, in tokens.
    """
    nets = [*map(sub, accumulate(gains, initial=0.0), prices)]
    best = max(nets)
    return nets.index(best) if best > least else 0


class Prices:
    """What rows cost, in tokens: the time that they add, and the tokens that such a time yields of late.

    Times are in plain steps of the curve. In a batch a plain step is a sequence's share of a forward with one row of
    each, and rows come on top of those that the others bring; so rows and drafting are the dearer.

    Args:
        costs: the target's.

    Attributes:
        batch_load: the sequences that share the next forward.
        rate: tokens per plain step's time of late, or those of plain steps where these are faster.
    """

    def __init__(self, costs: CostCurve | LiveCosts) -> None:
        self._costs = costs
        self.batch_load = UNBATCHED
        # Where a curve was read last and beside whom, which one, for how many rows, and what it said.
        self._place: tuple[int, BatchLoad, CostCurve | None] = (-1, UNBATCHED, None)
        self._most, self._read, self._found = 0, Reading([], []), ([0.0], 0, 1.0)
        self._tokens = self._time = _PRIOR_STEPS  # the prior is plain decoding
        self.rate = 1.0

    def _curve(self, length: int, most: int) -> tuple[list[float], int, float]:
        """Seconds of forwards after about ``length`` tokens, the others' rows in them, and those of a plain step.

        There are seconds of ``most`` rows or more beside the others'.
        """
        near, batch_load, curve = place = length // _BUCKET, self.batch_load, self._costs.now
        if place != self._place or most > self._most:
            sequences, beside = batch_load
            self._read = curve.reading(near * _BUCKET + _BUCKET // 2, max(beside + most, sequences))
            seconds, self._place = self._read.seconds, place
            self._most, self._found = len(seconds) - 1 - beside, (seconds, beside, seconds[sequences] / sequences)
        return self._found

    def plain(self, length: int) -> float:
        """Seconds of a plain step after about ``length`` tokens."""
        return self._curve(length, 1)[2]

    def step(self, length: int, rows: int) -> float:
        """What a step of so many rows costs after about ``length`` tokens, in plain steps; the root alone is one."""
        seconds, beside, plain = self._curve(length, rows)
        return 1 + (seconds[beside + rows] - seconds[beside + 1]) / plain

    def rows(self, length: int, steps: float, most: int) -> int:
        """How many rows, up to ``most``, cost no more than so many plain steps."""
        seconds, beside, plain = self._curve(length, most)
        limit = seconds[beside + 1] + (steps - 1) * plain
        return bisect_right(seconds, limit, beside, beside + most + 1) - 1 - beside

    def least(self, length: int, most: int) -> float:
        """Tokens that the cheapest row costs, of ``most`` or of those behind; one worth less pays beside no others."""
        _, beside, plain = self._curve(length, most)
        return self.rate * self._read.cheapest[beside + 1] / plain

    def price(self, length: int, rows: int, base: int = 1) -> float:
        """Tokens that the extra time of a step of so many rows over one of ``base`` rows would have brought."""
        seconds, beside, plain = self._curve(length, max(rows, base))
        return self.rate * (seconds[beside + rows] - seconds[beside + base]) / plain

    def drafting(self, fixed_rows: int, length: int, cost: float = 0.0) -> float:
        """Tokens that drafting costs, by a drafter's ``fixed_cost_rows`` and the draft's cost."""
        if not (fixed_rows or cost):
            return 0.0
        return self.rate * (ROW_SECONDS * fixed_rows / self.plain(length) + cost)

    def keep(
        self, gains: Sequence[float], length: int, *, base: int = 1, least: float = 0.0, share: float = 1.0
    ) -> int:
        """How many of the rows to keep, best first, beside ``base`` rows that are there anyway.

        ``gains``: each row's chance to be accepted, of which a ``share`` is believed. None are kept unless all together
        bring more than their price and ``least`` tokens.
        """
        seconds, beside, plain = self._curve(length, base + len(gains))
        rate, first = self.rate / plain / share, beside + base
        began = seconds[first]
        prices = [rate * (taken - began) for taken in seconds[first : first + len(gains) + 1]]
        return most_worth(gains, prices, least / share)

    def learn(self, rows: int, tokens: int, length: int) -> None:
        """Take note of a step of ``rows`` rows after ``length`` tokens that yielded ``tokens``."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._time = _MEMORY * self._time + self.step(length, rows)
        self.rate = max(self._tokens / self._time, 1.0)
