"""What a part of a merged drafter has been worth: how its rows fared, and whether it is to draft."""

from __future__ import annotations

from specdec.costs.policy import Patience
from specdec.costs.prices import Prices
from specdec.drafter import Drafter

__all__ = ["BY_MATCH", "DEPTHS", "MATCHES", "ONWARD", "RANKS", "Bandit", "kind_of"]

DEPTHS, RANKS, MATCHES = 8, 4, 6
_KINDS = (MATCHES + 1) * RANKS * 2 * (DEPTHS + 1)

# What is supposed before any was seen. Of a first rank by its draft's match: of 0, 1, 2-3, 4-7, ... tokens; then of a
# lower rank, and of a row that contradicts a part before it, beside a first rank.
BY_MATCH = (0.35, 0.3, 0.45, 0.6, 0.75, 0.85, 0.9)
ONWARD = 0.6  # at least this after a row that was right
_WEIGHT = 3.0  # of what is supposed, in rows seen

# Tokens a step that a part with much to compute may bring, by the rows of its tree, of which those that pay are taken.
_HOPES = [0.3 * (1 - 0.6**rows) for rows in range(1, 9)]
_GRACE = 0.05  # of a part that has little to compute
_DEBT = 0.01  # tokens a step that a part may lose, on average of late, before it sleeps


class Bandit:
    """What is known of a part: how its rows have fared, and what it has been worth lately, in tokens a step.

    Args:
        part: the drafter.
        memory: weight of the past, from one step or row to the next.
    """

    def __init__(self, part: Drafter, memory: float) -> None:
        self._memory, self._fixed_rows = memory, part.fixed_cost_rows
        self._hits, self._tries = [0.0] * _KINDS, [0.0] * _KINDS
        self._net: float | None = None  # until the prices of its first step are known
        # A part that has no model to run is simply tried, one that has waits until it may pay.
        self._computes = bool(part.taps)
        # What a model brings comes rarely and is much, what it takes comes every time: few steps say little of it.
        self._lasting = memory**0.25 if part.taps else memory
        self._patience = Patience(32, 256) if part.taps else Patience(4, 32)

    def chance(self, kind: int, supposed: float) -> float:
        """That such a row is right where its parent is; ``supposed``: of a kind of which nothing is known."""
        tries = self._tries[kind]
        return (self._hits[kind] + _WEIGHT * supposed) / (tries + _WEIGHT) if tries else supposed

    def reach(self, match: int, rows: int, least: float) -> list[float]:
        """Of a path of first ranks the chance that each row is reached, as far as it is not below the ``least``."""
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
        """One more such row, whose parent was right."""
        self._hits[kind] = self._memory * self._hits[kind] + right
        self._tries[kind] = self._memory * self._tries[kind] + 1

    def awake(self, prices: Prices, length: int) -> bool:
        """Whether the part drafts for this step; before any was judged, what a draft costs decides."""
        if self._net is None:
            hope = _GRACE
            if self._computes:
                hope = max(own - prices.price(length, rows) for rows, own in enumerate(_HOPES, 2))
            self._net = hope - prices.drafting(self._fixed_rows, length)
        if self._net > -_DEBT:
            return True
        # Sequences of a batch wake the part together, and each of them then pays for the try.
        if not self._patience.due(1 / prices.batch_load.sequences):
            return False
        self._net = 0.0  # a few disappointments, and it sleeps again
        return True

    def judge(self, prices: Prices, length: int, *, net: float, cost: float) -> None:
        """Take note of a step: tokens that its rows brought less their price, and the draft's cost."""
        assert self._net is not None
        net -= prices.drafting(self._fixed_rows, length, cost)
        self._net = self._lasting * self._net + (1 - self._lasting) * net
        if self._net > 0.05:
            self._patience.paid()


def kind_of(match: int, depth: int, rank: int, dissents: bool) -> int:
    """Rows of one kind are judged alike; ``match``: the bits of its length. Kinds of a path follow one another."""
    return ((match * RANKS + rank) * 2 + dissents) * (DEPTHS + 1) + depth
