"""Bandit: how often rows of one part of a merged drafter are right, and whether the part should draft.

It asks :mod:`specdec.costs.prices` the question of :mod:`specdec.costs.policy` for a part of a tree, whose rows compete
with other parts' rows.
"""

from __future__ import annotations

from specdec.costs.policy import Patience
from specdec.costs.prices import Prices
from specdec.drafter import Drafter

__all__ = ["BY_MATCH", "DEPTHS", "MATCHES", "ONWARD", "RANKS", "Bandit", "kind_of"]

DEPTHS, RANKS, MATCHES = 8, 4, 6
_KINDS = (MATCHES + 1) * RANKS * 2 * (DEPTHS + 1)

# Prior chance of a row of the first rank, by its draft's match length of 0, 1, 2-3, 4-7, ... tokens.
BY_MATCH = (0.35, 0.3, 0.45, 0.6, 0.75, 0.85, 0.9)
ONWARD = 0.6  # least prior chance of a row behind a row that was right
_WEIGHT = 3.0  # weight of the prior, in rows

# Expected gain per step, in tokens, of a part that runs a model and has 1, 2, ... rows in the tree.
_HOPES = [0.3 * (1 - 0.6**rows) for rows in range(1, 9)]
_GRACE = 0.05  # expected gain of a part that computes little
_DEBT = 0.01  # mean loss per step, in tokens, above which a part sleeps


class Bandit:
    """The record of a part: how often its rows were right, and its mean net gain in tokens per step.

    Args:
        part: the part's drafter.
        memory: weight of the past, from one step or row to the next.
    """

    def __init__(self, part: Drafter, memory: float) -> None:
        self._memory, self._fixed_rows = memory, part.fixed_cost_rows
        self._hits, self._tries = [0.0] * _KINDS, [0.0] * _KINDS
        self._net: float | None = None  # None until the prices of the part's first step are known
        # A part without a model is tried at once; a part with a model waits until it may pay.
        self._computes = bool(part.taps)
        # A model's gain is rare and large, its cost comes with every step: many steps are needed to judge it.
        self._lasting = memory**0.25 if part.taps else memory
        self._patience = Patience(32, 256) if part.taps else Patience(4, 32)

    def chance(self, kind: int, supposed: float) -> float:
        """Probability that a row of a kind is right where its parent is; ``supposed``: the prior."""
        tries = self._tries[kind]
        return (self._hits[kind] + _WEIGHT * supposed) / (tries + _WEIGHT) if tries else supposed

    def reach(self, match: int, rows: int, least: float) -> list[float]:
        """Probability to reach each row of a path of first ranks; it ends where the probability is below ``least``."""
        first, supposed, reached, reaches = kind_of(match, 0, 0, False), BY_MATCH[match], 1.0, list[float]()
        for depth in range(1, rows + 1):
            chance = self.chance(first + min(depth, DEPTHS), supposed)
            reached *= chance
            if reached < least:
                break
            reaches.append(reached)
            supposed = max(chance, ONWARD)
        return reaches

    def note(self, kind: int, right: bool) -> None:
        """Record whether a row was ``right`` whose parent was right."""
        self._hits[kind] = self._memory * self._hits[kind] + right
        self._tries[kind] = self._memory * self._tries[kind] + 1

    def awake(self, prices: Prices, length: int) -> bool:
        """Whether the part drafts for this step; before the first judgement, the cost of a draft decides."""
        if self._net is None:
            hope = (
                max(prices.gain(own, length, rows) for rows, own in enumerate(_HOPES, 2)) if self._computes else _GRACE
            )
            self._net = prices.gain(hope, length, 1, drafting=prices.drafting(self._fixed_rows, length))
        if self._net > -_DEBT:
            return True
        # Sequences of a batch share the bandit, and each of them pays for a try; so each counts a share of a step.
        if not self._patience.due(1 / prices.batch_load.sequences):
            return False
        self._net = 0.0  # a few losses, and it sleeps again
        return True

    def judge(self, prices: Prices, length: int, *, tokens: float, rows: int = 1, base: int = 1, cost: float) -> None:
        """Record a step of ``rows`` rows, all but ``base`` of them the part's: the ``tokens`` of these, and the draft's
        ``cost``."""
        assert self._net is not None
        drafting = prices.drafting(self._fixed_rows, length, cost)
        net = prices.gain(tokens, length, rows, base=base, drafting=drafting)
        self._net = self._lasting * self._net + (1 - self._lasting) * net
        if self._net > 0.05:
            self._patience.paid()


def kind_of(match: int, depth: int, rank: int, dissents: bool) -> int:
    """Number of a row's kind; rows of a kind share a record. ``match``: bits of the match length. Kinds of consecutive
    depths are consecutive."""
    return ((match * RANKS + rank) * 2 + dissents) * (DEPTHS + 1) + depth
