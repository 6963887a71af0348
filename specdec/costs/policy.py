"""Policy: how many rows of guesses a step may verify.

Every proposed row makes a step longer, by what the measured curve T(rows) says: the second row costs T(2) - T(1), the
next one T(3) - T(2), and so on, all told as fractions of T(1), a plain step. A guess that is accepted saves about one
plain step. So a drafter goes on proposing as long as its accepted tokens outweigh the steps that its rows cost.

- ``off``: no policy; the drafter proposes what its options say.
- ``acceptance``: an account per sequence, accepted tokens in, cost of rows out, by the curve: as it is now where that
  is followed (:mod:`specdec.costs.live_curve`), else as it was measured, and then the same calls take the same steps.
- ``cost``: the number of rows with the most expected tokens per second, by the curve and by what steps really took of
  late. Steps differ from run to run. Where the text depends on the rows proposed (``reject``, ``typical``), each
  sequence goes by the measured curve alone, so that a text at a seed does not differ.

Where the curve is followed, :mod:`specdec.costs.fallback` has sequences rest under any policy, drafting's own time
counted.

What is chosen follows from steps that are over, never from the draws of the one that it is chosen for, so sampling
stays lossless under each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from specdec.costs.curve import CostCurve
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import ROW_SECONDS, Prices
from specdec.errors import ConfigError, shown
from specdec.step.tree import Draft

__all__ = ["AcceptancePolicy", "CostPolicy", "Patience", "RowPolicy", "check_policy"]

_FIRST, _FALL = 0.4, 0.8  # chance of the first row before any was seen, enough to try; of a row, by the one before it
_PRIOR_WEIGHT = 2.0
_UNTRIED = 0.98  # memory of rows that were not proposed
_TRY = 9  # rows of a try

_START, _MOST = 0.75, 3.0  # accepted tokens on the account: at first, and the most that a drafter can save up
_TREE_ROWS = 1  # of them, for drafting and verifying any tree


class RowPolicy(Protocol):
    """Decides on the rows of steps.

    Attributes:
        prices: what rows cost now, for drafters that choose among their rows themselves.
    """

    prices: Prices

    def row_budget(self, limit: int, length: int) -> int:
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


class AcceptancePolicy:
    """Whether to ask a drafter, by acceptance alone. One serves one sequence.

    Each drafter has an account: accepted rows are paid in, what rows cost is paid out. A drafter whose account is empty
    rests. It gets one row for a try now and then, and less often after each try that fails.

    Args:
        curve: the target's.
        fixed_rows: the drafter's ``fixed_cost_rows``.
    """

    def __init__(self, costs: CostCurve | LiveCosts, fixed_rows: int = 0) -> None:
        self.prices = Prices(costs, clock=False)
        self._fixed_seconds = ROW_SECONDS * (_TREE_ROWS + fixed_rows)
        self._left = _START
        self._patience = Patience(1, 32)

    def row_budget(self, limit: int, length: int) -> int:
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

    def row_budget(self, limit: int, length: int) -> int:
        """Rows to allow a drafter that fills its row budget in order of promise: 1 where a plain step is better."""
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
