"""Trees of guesses that grow by probability, to the size that pays.

The chance of a row is the probability that it is right where its parent is; its *reach* is the product of the chances
along its path. Drafters that know all guesses at once let :meth:`ScoredTree.grow` take the likeliest rows one by one
(Medusa's heads, a table of successors). Drafters that run a model per level ``add`` a level's rows and read their
``reach`` before the next level (a draft model).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

__all__ = ["Guesses", "ScoredTree"]

Guesses = Sequence[tuple[int, float]]
"""Pairs of token and chance, the likeliest first."""


class ScoredTree:
    """Rows of a draft, the root first, each parent before its children.

    Args:
        root: token of the root.

    Attributes:
        tokens, parents, depths: one per row.
        chances: per row, probability that it is right where its parent is.
        reach: per row, probability that its whole path is right.
    """

    __slots__ = ("chances", "depths", "parents", "reach", "tokens")

    def __init__(self, root: int = 0) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.chances, self.reach = [1.0], [1.0]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float) -> None:
        """Add a row."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.chances.append(chance)
        self.reach.append(self.reach[parent] * chance)

    def path(self, row: int) -> list[int]:
        """Tokens below the root, down to and with ``row``."""
        path = list[int]()
        while row:
            path.append(self.tokens[row])
            row = self.parents[row]
        return path[::-1]

    def grow(
        self,
        guesses: Callable[[int], Guesses],
        most: int,
        deepest: int,
        least: Sequence[float] | None = None,
        share: float = 1.0,
    ) -> None:
        """Add up to ``most`` rows below the root, the likeliest to be reached first.

        Args:
            guesses: returns the guesses behind a row; called once per row that is not too deep, in order.
            most: most rows below the root.
            deepest: largest depth of a row.
            least: the least reach of the row after 0, 1, ... others, see
                :meth:`specdec.costs.prices.Prices.least_reach`; growth ends at the first row with less.
            share: factor on every chance.

        Example: if guesses have chances .5 and .2 everywhere, three rows are the best guess, the best guess behind it,
        and the second best guess.
        """
        tokens, parents, depths, reach = self.tokens, self.parents, self.depths, self.reach
        take, keep = heapq.heappop, heapq.heappush
        # Looked at is the best guess behind each row, and of each guess that was taken the next one: (-worth, parent,
        # rank, all of that parent's guesses).
        ahead = list[tuple[float, int, int, Guesses]]()
        row = len(tokens) - 1
        while True:
            if row < most and depths[row] < deepest and (behind := guesses(row)):
                keep(ahead, (-(reach[row] * behind[0][1] * share), row, 0, behind))
            if not ahead or row >= most:
                return
            worth, parent, rank, siblings = take(ahead)
            if least is not None and not -worth >= least[row]:  # NaN is worth nothing
                return
            tokens.append(siblings[rank][0])
            self.chances.append(siblings[rank][1])
            parents.append(parent)
            depths.append(depths[parent] + 1)
            reach.append(-worth)
            row, rank = row + 1, rank + 1
            if rank < len(siblings):
                keep(ahead, (-(reach[parent] * siblings[rank][1] * share), parent, rank, siblings))
