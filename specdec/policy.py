"""Policy: how many rows of guesses a step may verify.

Every proposed row makes a step longer, by what the measured curve T(rows) says: the second row costs T(2) - T(1), the
next one T(3) - T(2), and so on, all told as fractions of T(1), a plain step. A guess that is accepted saves about one
plain step. So a drafter goes on proposing as long as its accepted tokens outweigh the steps that its rows cost.

- ``off``: no policy; the drafter proposes what its options say.
- ``acceptance``: an account per sequence, accepted tokens in, cost of rows out, by the curve: as it is now where that
  is followed (:mod:`specdec.live`), else as it was measured, and then the same calls take the same steps.
- ``cost``: the number of rows with the most expected tokens per second, by the curve and by what steps really took of
  late. Steps differ from run to run. Where the text depends on the rows proposed (``reject``, ``typical``), each
  sequence goes by the measured curve alone, so that a text at a seed does not differ.

Where the curve is followed, :mod:`specdec.fallback` has sequences rest under any policy, drafting's own time counted.

What is chosen follows from steps that are over, never from the draws of the one that it is chosen for, so sampling
stays lossless under each of them.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from specdec.cost import CostCurve, Reading
from specdec.draft import Draft
from specdec.errors import ConfigError, shown
from specdec.live import LiveCosts

__all__ = ["ALONE", "AcceptancePolicy", "CostPolicy", "Crowd", "Patience", "Prices", "RowPolicy", "check_policy"]

_BUCKET = 256  # tokens of context for which one reading of the curve serves
_PRIOR_STEPS = 10.0  # plain steps that the first belief about tokens per step counts as
_LEAST = 1e-3  # a step takes at least this many times a plain one, even by a clock that stands still
_OUTLIER = 3.0  # a step that took longer than this many times what was due met another process, not a dearer forward

_FIRST, _FALL = 0.4, 0.8  # chance of the first row before any was seen, enough to try; of a row, by the one before it
_PRIOR_WEIGHT = 2.0
_UNTRIED = 0.98  # memory of rows that were not proposed
_TRY = 9  # rows of a try

_START, _MOST = 0.75, 3.0  # accepted tokens on the account: at first, and the most that a drafter can save up
_ROW_SECONDS = 1e-4  # one of a drafter's fixed_cost_rows
_TREE_ROWS = 1  # of them, for drafting and verifying any tree


class RowPolicy(Protocol):
    """Decides on the rows of steps.

    Attributes:
        prices: what rows cost now, for drafters that choose among their rows themselves.
    """

    prices: Prices

    def room(self, limit: int, length: int) -> int:
        """Rows to allow a drafter after ``length`` tokens, at most ``limit``; 1, the root alone, is a plain step."""

    def learn(self, draft: Draft, path: Sequence[int], length: int, drafting: float, seconds: float) -> None:
        """Take note of a step: what was verified after ``length`` tokens, the accepted rows, and what it took.

        ``drafting`` seconds are among the ``seconds``.
        """


class Patience:
    """When to try again what did not pay: after some steps, and after twice as many each time that it failed again."""

    def __init__(self, first: int = 4, most: int = 64) -> None:
        self._first, self._most = first, most
        self._wait = first
        self._left: float = first

    def due(self, share: float = 1.0) -> bool:
        """Count a step that goes without, or one sequence's share of it; whether the next try is due with it."""
        self._left -= share
        if self._left > 0:
            return False
        self._wait = min(2 * self._wait, self._most)
        self._left = self._wait
        return True

    def paid(self) -> None:
        """It paid: the next disappointment is met with little patience again."""
        self._wait = self._left = self._first


class Crowd(NamedTuple):
    """What a sequence shares its forwards with: how many ``sequences``, itself included; the others' ``rows``."""

    sequences: int
    rows: int


ALONE = Crowd(1, 0)


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
        crowd: the sequences that share the next forward.
        rate: tokens per plain step's time of late, or those of plain steps where these are faster.
    """

    def __init__(self, costs: CostCurve | LiveCosts, *, clock: bool, memory: float = 0.95) -> None:
        self._costs = costs
        self._clock, self._memory = clock, memory
        self.crowd = ALONE
        # Where a curve was read last and beside whom, which one, for how many rows, and what it said.
        self._place: tuple[int, Crowd, CostCurve | None] = (-1, ALONE, None)
        self._most, self._read, self._found = 0, Reading([], []), ([0.0], 0, 1.0)
        self._tokens = self._time = _PRIOR_STEPS  # the prior is plain decoding
        self._taken = self._due = _PRIOR_STEPS  # outside of drafting; by the clock and by the curve
        self.rate = self._step_rate = 1.0  # the latter in steps of the curve, which may take longer than that

    def _curve(self, length: int, most: int) -> tuple[list[float], int, float]:
        """Seconds of forwards after about ``length`` tokens, the others' rows in them, and those of a plain step.

        There are seconds of ``most`` rows or more beside the others'.
        """
        near, crowd, curve = place = length // _BUCKET, self.crowd, self._costs.now
        if place != self._place or most > self._most:
            sequences, beside = crowd
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
        return self.rate * (seconds / plain if self._clock else _ROW_SECONDS * fixed_rows / plain + cost)

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


class AcceptancePolicy:
    """Whether to ask a drafter, by acceptance alone. One serves one sequence.

    Accepted rows are income, what rows cost is expenses, and nobody spends more than he has. A drafter whose account is
    empty rests; it gets one row for a try now and then, more rarely each time that this is lost too.

    Args:
        curve: the target's.
        fixed_rows: the drafter's ``fixed_cost_rows``.
    """

    def __init__(self, costs: CostCurve | LiveCosts, fixed_rows: int = 0) -> None:
        self.prices = Prices(costs, clock=False)
        self._fixed_seconds = _ROW_SECONDS * (_TREE_ROWS + fixed_rows)
        self._left = _START
        self._patience = Patience(1, 32)

    def room(self, limit: int, length: int) -> int:
        """Rows that the drafter can pay for: the root alone where that is none."""
        prices, fixed = self.prices, self._fixed(length)
        least = prices.step(length, 2) - 1 + fixed
        if self._left < least:
            if not self._patience.due():
                return min(limit, 1)
            self._left = least
        return min(limit, max(prices.rows(length, 1 + self._left - fixed, limit), 2))

    def learn(self, draft: Draft, path: Sequence[int], length: int, drafting: float, seconds: float) -> None:
        """As :meth:`RowPolicy.learn`; a drafter that had nothing to say, and ran no model for it, is not judged."""
        rows = len(draft)
        self.prices.learn(rows, len(path), length, 0.0, 0.0)
        if rows == 1 and not draft.cost:
            return
        spent = self.prices.step(length, rows) - 1 + self._fixed(length) + draft.cost
        self._left = min(self._left + len(path) - 1 - spent, _MOST)
        if self._left >= _START:
            self._patience.paid()

    def _fixed(self, length: int) -> float:
        """What drafting costs besides rows, in plain steps."""
        return self._fixed_seconds / self.prices.plain(length)


class CostPolicy:
    """The rows with the most expected tokens per second: their price against how often such rows were right of late.

    With T the cost curve, r the tokens per second of late and g the chance that a row is accepted, n rows are worth
    ``sum(g) - r * (T(n) - T(1))`` tokens more than a plain step; the n that maximises this is taken, none where
    speculation loses. With a clock one serves all sequences of an engine; without one, one serves one sequence.

    Args:
        costs: the target's.
        clock: go by what steps and drafting take.
        fixed_rows: the drafter's ``fixed_cost_rows``, what drafting costs where no clock says it.
        memory: weight of the past, from one step to the next.
    """

    def __init__(
        self, costs: CostCurve | LiveCosts, *, clock: bool = True, fixed_rows: int = 0, memory: float = 0.95
    ) -> None:
        self.prices = Prices(costs, clock=clock, memory=memory)
        self._memory, self._fixed_rows = memory, _TREE_ROWS + fixed_rows
        self._hits: list[float] = []  # per row number: accepted, and seen
        self._tries: list[float] = []
        self._draft = 0.0  # tokens that drafting costs, per step that drafted
        self._patience = Patience()
        self._rests = False  # rows did not pay when last weighed, and are not weighed until the next try is due

    def room(self, limit: int, length: int) -> int:
        """Rows to allow a drafter that fills its room in order of promise: 1 where a plain step is better."""
        if limit < 2 or (self._rests and not self._patience.due()):
            return min(limit, 1)
        known = min(limit - 1, max(len(self._hits), 8))
        count = self.prices.keep(self._gains(known), length, least=self._draft)
        if count:
            self._rests = False
            self._patience.paid()
            return count + 1 if count < known else limit
        again, self._rests = self._rests, True
        return min(limit, _TRY) if again else 1

    def learn(self, draft: Draft, path: Sequence[int], length: int, drafting: float, seconds: float) -> None:
        """As :meth:`RowPolicy.learn`."""
        memory, rows = self._memory, len(draft)
        self.prices.learn(rows, len(path), length, drafting, seconds)
        if rows == 1:
            return
        took = self.prices.drafting(drafting, self._fixed_rows, length, draft.cost)
        self._draft += (1 - memory) * (took - self._draft)
        self._hits += [0.0] * (rows - len(self._hits))
        self._tries += [0.0] * (rows - len(self._tries))
        accepted = set(path)
        for row in range(1, len(self._hits)):
            past = memory if row < rows else _UNTRIED
            self._hits[row] = past * self._hits[row] + (row in accepted)
            self._tries[row] = past * self._tries[row] + (row < rows)

    def _gains(self, most: int) -> list[float]:
        """The chance of each of the rows 1 .. ``most``; what is not known of a row follows from the row before it."""
        gains, gain = list[float](), _FIRST / _FALL
        for row in range(1, most + 1):
            hits, tries = (self._hits[row], self._tries[row]) if row < len(self._hits) else (0.0, 0.0)
            gain = (hits + _PRIOR_WEIGHT * _FALL * gain) / (tries + _PRIOR_WEIGHT)
            gains.append(gain)
        return gains


def check_policy(choice: str) -> str:
    """The choice, if it may be one.

    Raises:
        ConfigError: neither acceptance, cost nor off, and no file.
    """
    if choice not in ("acceptance", "cost", "off") and not os.path.isfile(choice):
        raise ConfigError(
            f"policy={shown(choice)} is unknown; choose acceptance, cost, off, or a cost file made by "
            "`specdec tune --out FILE`"
        )
    return choice
