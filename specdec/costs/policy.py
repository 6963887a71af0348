"""Row policy: how many rows a drafter may propose that does not choose them itself.

Every row makes a step longer by what the cost curve T(rows) says: the second row costs T(2) - T(1), the third
T(3) - T(2), and so on, each as a fraction of T(1), a plain step. An accepted row saves about one plain step. So a
drafter proposes as long as its accepted rows outweigh the cost of its rows.

- ``off``: no policy; the drafter's options decide.
- ``acceptance``: one account per sequence; accepted rows are paid in, the cost of rows is paid out. It uses the live
  curve (:mod:`specdec.costs.live_curve`) where there is one; else the measured curve, and then equal calls take equal
  steps.
- a path: the same with the cost curve in that file.

Where there is a live curve, :mod:`specdec.costs.fallback` stops drafting under any policy while it does not pay.

Every choice depends on finished steps only, never on the draws of the step it is made for, so sampling stays lossless.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from specdec.costs.curve import CostCurve
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import Prices
from specdec.errors import ConfigError, shown
from specdec.step.tree import Draft

__all__ = ["AcceptancePolicy", "Patience", "RowPolicy", "check_policy"]

_START, _MOST = 0.75, 3.0  # balance of an account in accepted rows: at first, and at most
_LONG, _SELDOM = 16, 128  # steps between two tries: from which drafting rests for long, and at most
_TREE_ROWS = 1  # fixed cost of drafting and verifying any tree, as a drafter's fixed_cost_rows


class RowPolicy(Protocol):
    """Decides how many rows a step may have.

    Attributes:
        prices: current prices of rows, also for drafters that choose their rows themselves.
    """

    prices: Prices

    @property
    def rests(self) -> bool:
        """Whether drafting failed for so long that it is tried but rarely; then nothing is asked for it in between."""

    def row_budget(self, limit: int, length: int) -> int:
        """The most rows that a drafter may propose after ``length`` tokens, at most ``limit``; 1 is a plain step."""

    def learn(self, draft: Draft, path: Sequence[int], length: int) -> None:
        """Record a step: the draft that was verified after ``length`` tokens, and its accepted rows."""


class Patience:
    """Decides when to retry what did not pay: after ``first`` steps at first, later after twice as many each time.

    It waits for ``most`` steps at most.
    """

    def __init__(self, first: int = 4, most: int = 64) -> None:
        self._first, self._most = first, most
        self._wait = first
        self._left: float = first

    def due(self, share: float = 1.0) -> bool:
        """Count a step without a try, or one sequence's ``share`` of it; True if a try is due now."""
        self._left -= share
        if self._left > 0:
            return False
        self._wait = min(2 * self._wait, self._most)
        self._left = self._wait
        return True

    @property
    def wait(self) -> int:
        """Steps from the latest try to the next one."""
        return self._wait

    def paid(self) -> None:
        """Record that a try paid: the next wait is the first one again."""
        self._wait = self._left = self._first


class AcceptancePolicy:
    """The row policy ``acceptance``, for one sequence.

    Accepted rows are paid into the drafter's account, and the cost of its rows is paid out. A drafter whose account is
    empty rests. It gets one row for a try now and then, more rarely after each try that fails.

    Args:
        costs: the target's curve, measured or live.
        fixed_rows: the drafter's ``fixed_cost_rows``.
    """

    def __init__(self, costs: CostCurve | LiveCosts, fixed_rows: int = 0) -> None:
        self.prices = Prices(costs)
        self._fixed_rows = _TREE_ROWS + fixed_rows
        self._left = _START
        self._patience = Patience(1, _SELDOM)

    @property
    def rests(self) -> bool:
        return self._patience.wait >= _LONG

    def row_budget(self, limit: int, length: int) -> int:
        """As :meth:`RowPolicy.row_budget`: the rows that the balance covers."""
        prices, drafting = self.prices, self.prices.drafting(self._fixed_rows, length)
        least = prices.added(length, 2) + drafting
        if self._left < least:
            if not self._patience.due():
                return min(limit, 1)
            self._left = least
        return min(limit, max(prices.rows(length, 1 + self._left - drafting, limit), 2))

    def learn(self, draft: Draft, path: Sequence[int], length: int) -> None:
        """As :meth:`RowPolicy.learn`; a draft of the root alone that cost nothing does not change the balance."""
        rows = len(draft)
        self.prices.learn(rows, len(path), length)
        if rows == 1 and not draft.hints.cost:
            return
        drafting = self.prices.drafting(self._fixed_rows, length, draft.hints.cost)
        gain = self.prices.gain(len(path) - 1, length, rows, drafting=drafting, rate=1.0)
        self._left = min(self._left + gain, _MOST)
        if self._left >= _START:
            self._patience.paid()


def check_policy(choice: str) -> str:
    """The policy that ``choice`` names.

    Raises:
        ConfigError: ``choice`` is neither acceptance nor off nor an existing file.
    """
    if choice not in ("acceptance", "off") and not os.path.isfile(choice):
        raise ConfigError(
            f"policy={shown(choice)} is unknown; choose acceptance, off, or a cost file made by "
            "`specdec tune --out FILE`"
        )
    return choice
