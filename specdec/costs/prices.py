"""Prices of rows, in tokens: the time that they add, and the tokens that such a time yields of late."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from specdec.costs.curve import CostCurve, Reading
from specdec.costs.live_curve import LiveCosts

__all__ = ["ROW_SECONDS", "UNBATCHED", "BatchLoad", "Prices"]

_BUCKET = 256  # tokens of context for which one reading of the curve serves
_PRIOR_STEPS = 10.0  # plain steps that the first belief about tokens per step counts as
_LEAST = 1e-3  # a step takes at least this many times a plain one, even by a clock that stands still
_OUTLIER = 3.0  # a step that took longer than this many times what was due met another process, not a dearer forward
ROW_SECONDS = 1e-4  # one of a drafter's fixed_cost_rows


class BatchLoad(NamedTuple):
    """What a sequence shares its forwards with: how many ``sequences``, itself included; the others' ``rows``."""

    sequences: int
    rows: int


UNBATCHED = BatchLoad(1, 0)


class Prices:
    """What rows cost, in tokens: the time that they add, and the tokens that such a time yields of late.

    Times are in plain steps of the curve. Without a clock every step takes what the curve says.

    In a crowd a plain step is a sequence's share of a forward with one row of each, and rows come on top of those that
    the others bring; so rows and drafting are the dearer.

    Args:
        costs: the target's.
        clock: go by what steps take, too.
        memory: weight of the past, from one step to the next.

    Attributes:
        batch_load: the sequences that share the next forward.
        rate: tokens per plain step's time of late, or those of plain steps where these are faster.
    """

    def __init__(self, costs: CostCurve | LiveCosts, *, clock: bool, memory: float = 0.95) -> None:
        self._costs = costs
        self._clock, self._memory = clock, memory
        self.batch_load = UNBATCHED
        # Where a curve was read last and beside whom, which one, for how many rows, and what it said.
        self._place: tuple[int, BatchLoad, CostCurve | None] = (-1, UNBATCHED, None)
        self._most, self._read, self._found = 0, Reading([], []), ([0.0], 0, 1.0)
        self._tokens = self._time = _PRIOR_STEPS  # the prior is plain decoding
        self._taken = self._due = _PRIOR_STEPS  # outside of drafting; by the clock and by the curve
        self.rate = self._step_rate = 1.0  # the latter in steps of the curve, which may take longer than that

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
        return self._step_rate * self._read.cheapest[beside + 1] / plain

    def price(self, length: int, rows: int, base: int = 1) -> float:
        """Tokens that the extra time of a step of so many rows over one of ``base`` rows would have brought."""
        seconds, beside, plain = self._curve(length, max(rows, base))
        return self._step_rate * (seconds[beside + rows] - seconds[beside + base]) / plain

    def drafting(self, seconds: float, fixed_rows: int, length: int, cost: float = 0.0) -> float:
        """Tokens that drafting for ``seconds`` costs; without a clock, by ``fixed_cost_rows`` and the draft's cost."""
        if not (self._clock or fixed_rows or cost):
            return 0.0
        plain = self.plain(length)
        return self.rate * (seconds / plain if self._clock else ROW_SECONDS * fixed_rows / plain + cost)

    def keep(
        self, gains: Sequence[float], length: int, *, base: int = 1, least: float = 0.0, share: float = 1.0
    ) -> int:
        """How many of the rows to keep, best first, beside ``base`` rows that are there anyway.

        ``gains``: each row's chance to be accepted, of which a ``share`` is believed. None are kept unless all together
        bring more than their price and ``least`` tokens.
        """
        seconds, beside, plain = self._curve(length, base + len(gains))
        rate, first = self._step_rate / plain / share, beside + base
        best, worth, total = 0, least / share, 0.0
        for rows, gain in enumerate(gains, 1):
            total += gain
            net = total - rate * (seconds[first + rows] - seconds[first])
            if net > worth:
                best, worth = rows, net
        return best

    def learn(self, rows: int, tokens: int, length: int, drafting: float, seconds: float) -> None:
        """Take note of a step of ``rows`` rows that yielded ``tokens``; see :meth:`RowPolicy.learn`."""
        memory = self._memory
        due = taken = spent = self.step(length, rows)
        if self._clock:
            plain = self.plain(length)
            taken = min((seconds - drafting) / plain, _OUTLIER * due * max(self._taken / self._due, 1.0))
            taken = max(taken, _LEAST)
            spent = taken + drafting / plain
            self._taken = memory * self._taken + taken
            self._due = memory * self._due + due
        self._tokens = memory * self._tokens + tokens
        self._time = memory * self._time + spent
        self.rate = max(self._tokens / self._time, self._due / self._taken)
        self._step_rate = self.rate * self._taken / self._due
