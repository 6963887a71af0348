"""Prices of rows in tokens: the time that a row adds, times the tokens per second of recent steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from specdec.costs.curve import BUCKET, CostCurve, Reading
from specdec.costs.live_curve import LiveCosts

__all__ = ["UNBATCHED", "BatchLoad", "Prices", "most_worth"]

_PRIOR_STEPS = 10.0  # weight of the prior, one token per plain step, in steps
_MEMORY = 0.95  # weight of the past, from one step to the next
_ROW_SECONDS = 1e-4  # one of a drafter's fixed_cost_rows


class BatchLoad(NamedTuple):
    """The load of a sequence's forwards: the number of ``sequences``, itself included, and the others' ``rows``."""

    sequences: int
    rows: int


UNBATCHED = BatchLoad(1, 0)


def most_worth(gains: Sequence[float], prices: Sequence[float], least: float = 0.0) -> int:
    """The number of rows, best first, with the largest expected gain; 0 where no number gains more than ``least``.

    Args:
        gains: per row, the probability that it is accepted, which is its expected gain in tokens.
        prices: price of 0, 1, ... rows, in tokens.
    """
    nets = [*map(sub, accumulate(gains, initial=0.0), prices)]
    best = max(nets)
    return nets.index(best) if best > least else 0


class Prices:
    """Prices of rows and of drafting for one sequence, in plain steps or in tokens.

    The unit of time is the plain step. In a batch it is a sequence's share of a forward with one row per sequence, and
    the sequence's rows come on top of the others' rows; so rows and drafting cost more plain steps than alone.

    Args:
        costs: the target's curve.

    Attributes:
        batch_load: the sequences that share the next forward.
        rate: tokens per plain step of time in recent steps, at least 1, which is plain decoding's.
    """

    def __init__(self, costs: CostCurve | LiveCosts) -> None:
        self._costs = costs
        self.batch_load = UNBATCHED
        # The latest reading: where it was taken, for how many rows, and its result.
        self._place: tuple[int, BatchLoad, CostCurve | None] = (-1, UNBATCHED, None)
        self._most, self._read, self._found = 0, Reading([], []), ([0.0], 0, 1.0)
        self._tokens = self._time = _PRIOR_STEPS
        self.rate = 1.0

    def _curve(self, length: int, most: int) -> tuple[list[float], int, float]:
        """Seconds of forwards by rows, the others' rows among them, and the seconds of a plain step.

        The first reaches to ``most`` rows or more beside the others'.
        """
        batch_load, curve = self.batch_load, self._costs.now
        place = length // BUCKET, batch_load, curve
        if place != self._place or most > self._most:
            sequences, beside = batch_load
            self._read = curve.near(length, max(beside + most, sequences))
            seconds, self._place = self._read.seconds, place
            self._most, self._found = len(seconds) - 1 - beside, (seconds, beside, seconds[sequences] / sequences)
        return self._found

    def plain(self, length: int) -> float:
        """Seconds of a plain step after about ``length`` tokens."""
        return self._curve(length, 1)[2]

    def step(self, length: int, rows: int) -> float:
        """Cost of a step of ``rows`` rows after about ``length`` tokens, in plain steps; 1 for the root alone."""
        seconds, beside, plain = self._curve(length, rows)
        return 1 + (seconds[beside + rows] - seconds[beside + 1]) / plain

    def rows(self, length: int, steps: float, most: int) -> int:
        """The largest number of rows, up to ``most``, whose step costs at most ``steps`` plain steps."""
        seconds, beside, plain = self._curve(length, most)
        limit = seconds[beside + 1] + (steps - 1) * plain
        return bisect_right(seconds, limit, beside, beside + most + 1) - 1 - beside

    def least(self, length: int, most: int) -> float:
        """Price of the cheapest row in tokens; a row with a smaller expected gain never pays."""
        _, beside, plain = self._curve(length, most)
        return self.rate * self._read.cheapest[beside + 1] / plain

    def price(self, length: int, rows: int, base: int = 1) -> float:
        """Price in tokens of a step of ``rows`` rows beyond one of ``base`` rows."""
        seconds, beside, plain = self._curve(length, max(rows, base))
        return self.rate * (seconds[beside + rows] - seconds[beside + base]) / plain

    def fixed(self, fixed_rows: int, length: int) -> float:
        """Cost of drafting in plain steps, by a drafter's ``fixed_cost_rows``."""
        return _ROW_SECONDS * fixed_rows / self.plain(length)

    def drafting(self, fixed_rows: int, length: int, cost: float = 0.0) -> float:
        """Price of drafting in tokens, by a drafter's ``fixed_cost_rows`` and the draft's ``hints.cost``."""
        if not (fixed_rows or cost):
            return 0.0
        return self.rate * (self.fixed(fixed_rows, length) + cost)

    def keep(
        self, gains: Sequence[float], length: int, *, base: int = 1, least: float = 0.0, share: float = 1.0
    ) -> int:
        """The number of rows to keep, best first, beside ``base`` rows that are verified in any case.

        ``gains``: per row, the probability that it is accepted, to be multiplied by ``share``. The result is 0 unless
        the kept rows gain more than their price plus ``least`` tokens.
        """
        seconds, beside, plain = self._curve(length, base + len(gains))
        rate, first = self.rate / plain / share, beside + base
        began = seconds[first]
        prices = [rate * (taken - began) for taken in seconds[first : first + len(gains) + 1]]
        return most_worth(gains, prices, least / share)

    def learn(self, rows: int, tokens: int, length: int) -> None:
        """Record a step of ``rows`` rows after ``length`` tokens that emitted ``tokens`` tokens."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._time = _MEMORY * self._time + self.step(length, rows)
        self.rate = max(self._tokens / self._time, 1.0)
