"""Policy: how many rows of guesses a step may verify.

Every proposed row makes a step longer, by what the measured curve T(rows) says: the second row costs T(2) - T(1), the
next one T(3) - T(2), and so on, each as a fraction of T(1), a plain step. A guess that is accepted saves about one
plain step. So a drafter goes on proposing as long as its accepted tokens outweigh the steps that its rows cost.

- ``off``: no policy; the drafter proposes what its options say.
- ``acceptance``: an account per sequence, accepted tokens in, cost of rows out, by the curve: as it is now where that
  is followed (:mod:`specdec.costs.live_curve`), else as it was measured, and then the same calls take the same steps.
- a path: the same, by the curve in that file.

Where the curve is followed, :mod:`specdec.costs.fallback` has sequences rest under any policy, drafting's own time
counted.

What is chosen follows from steps that are over, never from the draws of the one that it is chosen for, so sampling
stays lossless under each of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Protocol

from specdec.costs.curve import CostCurve
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import ROW_SECONDS, Prices
from specdec.errors import ConfigError, SpecdecWarning, shown
from specdec.step.tree import Draft

__all__ = ["AcceptancePolicy", "Patience", "RowPolicy", "check_policy"]

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

    def learn(self, draft: Draft, path: Sequence[int], length: int) -> None:
        """Take note of a step: what was verified after ``length`` tokens, and the accepted rows."""


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
    """How many rows a drafter gets, by acceptance alone. One serves one sequence.

    Each drafter has an account: accepted rows are paid in, what rows cost is paid out. A drafter whose account is empty
    rests. It gets one row for a try now and then, and less often after each try that fails.

    Args:
        curve: the target's.
        fixed_rows: the drafter's ``fixed_cost_rows``.
    """

    def __init__(self, costs: CostCurve | LiveCosts, fixed_rows: int = 0) -> None:
        self.prices = Prices(costs)
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

    def learn(self, draft: Draft, path: Sequence[int], length: int) -> None:
        """As :meth:`RowPolicy.learn`; a draft of the root alone, for which no model ran, is not judged."""
        rows = len(draft)
        self.prices.learn(rows, len(path), length)
        if rows == 1 and not draft.hints.cost:
            return
        spent = self.prices.step(length, rows) - 1 + self._fixed(length) + draft.hints.cost
        self._left = min(self._left + len(path) - 1 - spent, _MOST)
        if self._left >= _START:
            self._patience.paid()

    def _fixed(self, length: int) -> float:
        """What drafting costs besides rows, in plain steps."""
        return self._fixed_seconds / self.prices.plain(length)


def check_policy(choice: str) -> str:
    """The choice, if it may be one; ``cost``, which went by a clock before the curve did, is ``acceptance``.

    Raises:
        ConfigError: neither acceptance nor off, and no file.
    """
    if choice == "cost":
        message = "policy='cost' is 'acceptance' now, whose costs follow what forwards take; give that"
        warnings.warn(message, SpecdecWarning, stacklevel=3)
        return "acceptance"
    if choice not in ("acceptance", "off") and not os.path.isfile(choice):
        raise ConfigError(
            f"policy={shown(choice)} is unknown; choose acceptance, off, or a cost file made by "
            "`specdec tune --out FILE`"
        )
    return choice
