"""Prices: the one place where expected tokens are set against time.

The row policy, the parts of ``auto``, the fallback and drafters that choose their rows ask here whether rows, a pass or
drafting at all pays. Each of them records only what it has seen itself. Time is counted in plain steps, and a token is
worth one plain step, or less where recent steps emitted more tokens in that time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from specdec.costs.curve import BUCKET, CostCurve, Reading
from specdec.costs.live_curve import LiveCosts

__all__ = ["UNBATCHED", "BatchLoad", "Prices", "Rest", "pace"]

_PRIOR_STEPS = 10.0  # weight of the prior, one token per plain step, in steps
_MEMORY = 0.95  # weight of the past, from one step to the next
_ROW_SECONDS = 1e-4  # one of a drafter's fixed_cost_rows
_ROUNDED = 1 + 1e-9  # factor on a time up to which rows may be taken, so that rounding excludes none of equal cost


class BatchLoad(NamedTuple):
    """The load of a sequence's forwards: the number of ``sequences``, itself included, and the others' ``rows``."""

    sequences: int
    rows: int


UNBATCHED = BatchLoad(1, 0)


class Rest(IntEnum):
    """Whether drafting rests in a step: not at all, for this step to know what a plain one takes, or for many steps."""

    NONE = 0
    STEP = 1
    LONG = 2


def pace(tokens: float, steps: float) -> float:
    """Tokens per plain step of time, of ``tokens`` that take ``steps`` plain steps; plain decoding's pace is 1."""
    return tokens / steps


class Prices:
    """What rows and drafting cost a sequence in plain steps, and what is gained by them in tokens.

    The unit of time is the plain step. In a batch it is a sequence's share of a forward with one row per sequence, and
    the sequence's rows come on top of the others' rows; so rows and drafting cost more plain steps than alone.

    Args:
        costs: the target's curve, measured or live.

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
        """Time of a step of ``rows`` rows after about ``length`` tokens, in plain steps; 1 for the root alone."""
        return 1 + self.added(length, rows)

    def added(self, length: int, rows: int, base: int = 1) -> float:
        """Time of a step of ``rows`` rows beyond one of ``base`` rows, in plain steps."""
        seconds, beside, plain = self._curve(length, rows if rows > base else base)
        return (seconds[beside + rows] - seconds[beside + base]) / plain

    def rows(self, length: int, steps: float, most: int) -> int:
        """The largest number of rows, up to ``most``, whose step costs at most ``steps`` plain steps."""
        seconds, beside, plain = self._curve(length, most)
        limit = (seconds[beside + 1] + (steps - 1) * plain) * _ROUNDED
        return bisect_right(seconds, limit, beside, beside + most + 1) - 1 - beside

    def least(self, length: int, most: int) -> float:
        """Price of the cheapest row in tokens; a row with a smaller expected gain never pays."""
        _, beside, plain = self._curve(length, most)
        return self.rate * self._read.cheapest[beside + 1] / plain

    def least_reach(self, length: int, most: int, faint: float) -> list[float]:
        """The least reach with which the row after 0, 1, ... others below the root can pay; infinite after ``most``.

        Further rows have no larger reach, and any number of them costs at least so much per row. ``faint`` is the least
        even where rows are free.
        """
        prices = [self.rate * self.added(length, 1 + rows) for rows in range(most + 1)]
        hull = [most]  # corners of the largest convex curve that is nowhere above the prices of more rows, nearest last
        least = [math.inf]

        def each(rows: int, more: int) -> float:
            return (prices[more] - prices[rows]) / (more - rows)

        for rows in range(most - 1, -1, -1):
            while len(hull) > 1 and each(rows, hull[-1]) >= each(rows, hull[-2]):
                hull.pop()
            least.append(max(each(rows, hull[-1]), faint))
            hull.append(rows)
        return least[::-1]

    def drafting(self, fixed_rows: int, length: int, cost: float = 0.0) -> float:
        """Time of drafting in plain steps, by a drafter's ``fixed_cost_rows`` and the draft's ``hints.cost``."""
        return _ROW_SECONDS * fixed_rows / self.plain(length) + cost if fixed_rows else cost

    def gain(
        self, tokens: float, length: int, rows: int, *, base: int = 1, drafting: float = 0.0, rate: float | None = None
    ) -> float:
        """Expected ``tokens`` of a step of ``rows`` rows beyond one of ``base`` rows, less the price of its time.

        ``drafting``: plain steps that it takes besides; ``rate``: tokens per plain step instead of the recent ones.
        """
        return tokens - (self.rate if rate is None else rate) * (self.added(length, rows, base) + drafting)

    def of_rows(self, length: int, most: int, *, base: int = 1, share: float = 1.0) -> list[float]:
        """The price in tokens of 1, 2, ... ``most`` rows beside ``base`` others, divided by ``share``."""
        seconds, beside, plain = self._curve(length, base + most)
        rate, first = self.rate / plain / share, beside + base
        began = seconds[first]
        return [rate * (taken - began) for taken in seconds[first + 1 : first + most + 1]]

    def keep(
        self, gains: Sequence[float], length: int, *, base: int = 1, least: float = 0.0, share: float = 1.0
    ) -> int:
        """The number of rows to keep, best first, beside ``base`` rows that are verified in any case.

        ``gains``: per row, the probability that it is accepted, to be multiplied by ``share``. The result is 0 unless
        the kept rows gain more than their price plus ``least`` tokens, which may be negative.
        """
        prices = self.of_rows(length, len(gains), base=base, share=share)
        nets, least = [*map(sub, accumulate(gains), prices)], least / share
        best = max(nets, default=least)
        return 1 + nets.index(best) if best > least else 0

    def fastest(self, gains: Sequence[float], length: int) -> int:
        """The number of rows below the root, at least 1, with the most expected tokens per second; ``gains`` as above.

        It does not depend on recent steps, for sizes that are chosen once.
        """
        tokens = [*accumulate(gains, initial=1.0)]
        paces = [pace(tokens[rows], self.step(length, 1 + rows)) for rows in range(1, len(tokens))]
        return 1 + paces.index(max(paces)) if paces else 1

    def learn(self, rows: int, tokens: int, length: int) -> None:
        """Record a step of ``rows`` rows after ``length`` tokens that emitted ``tokens`` tokens."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._time = _MEMORY * self._time + self.step(length, rows)
        self.rate = max(pace(self._tokens, self._time), 1.0)
