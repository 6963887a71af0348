"""Trees of guesses: they grow by the chance that a guess is reached, to the size that pays.

A row's chance is that it is right where its parent is; that it is *reached* has the product of the chances down its
path. Drafters whose guesses are at hand let :meth:`ScoredTree.grow` take the likeliest rows of all, one by one
(Medusa's heads, a table of successors). Those that run a model for every level ``add`` a level's rows and look at their
``reach`` before the next one (a draft model).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from specdec.costs.curve import CostCurve
from specdec.costs.prices import most_worth

__all__ = ["Guesses", "Margin", "ScoredTree"]

Guesses = Sequence[tuple[int, float]]
"""Tokens and their chances, the likeliest first."""


class ScoredTree:
    """Rows of a draft, the root first, each parent before its children.

    Args:
        root: its token.

    Attributes:
        tokens, parents, depths: of each row.
        chances: that it is right where its parent is.
        reach: that all of its path is right.
    """

    __slots__ = ("chances", "depths", "parents", "reach", "tokens")

    def __init__(self, root: int = 0) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.chances, self.reach = [1.0], [1.0]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, chance: float) -> None:
        """One more row."""
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
            guesses: what may follow a row, called once for each that is not too deep, in the order of the rows.
            most: rows in all, less the root.
            deepest: depth of a row.
            least: what a row must be worth to follow 0, 1, ... others; with the first that is worth less it ends. See
                :attr:`Margin.least`.
            share: of each chance that is believed.

        Example: where the guesses are of chances .5 and .2 everywhere, three rows are the best guess, the best behind
        it, and the second best.
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


class Margin:
    """Which rows of a tree pay, where a token is worth a plain step.

    Args:
        costs: the target's.
        length: tokens of the text.
        most: nodes of a tree.
        faint: what a node must be worth even where rows are free.

    Attributes:
        least: of a tree of 0, 1, ... nodes, what the next one must be worth, or no more of them will pay: none behind
            it is worth more, and so many will cost at least that much each.
    """

    def __init__(self, costs: CostCurve, length: int, most: int, faint: float) -> None:
        steps = costs.steps(length, most + 1)[1:]  # of 0, 1, ... nodes
        self._prices = [step - steps[0] for step in steps]
        self.least = [math.inf]
        hull = [most]  # corners of the largest convex curve that is nowhere above the steps of more nodes, nearest last

        def each(nodes: int, more: int) -> float:
            return (steps[more] - steps[nodes]) / (more - nodes)

        for nodes in range(most - 1, -1, -1):
            while len(hull) > 1 and each(nodes, hull[-1]) >= each(nodes, hull[-2]):
                hull.pop()
            self.least.append(max(each(nodes, hull[-1]), faint))
            hull.append(nodes)
        self.least.reverse()

    def size(self, worths: Sequence[float]) -> int:
        """How many nodes, likeliest first, bring the most tokens over what their rows cost."""
        return most_worth(worths, self._prices)
