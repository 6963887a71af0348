"""Settled: the shape of a draft that is decided before its tokens are known, so that a device is not read for it.

A row's chance is the share of tokens of its rank that were right in this text, behind rows that were right
(:class:`drafters.shared.ranks.Ranks`). So it does not depend on the guesses themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafters.shared.scored_tree import Guesses, ScoredTree
from specdec.step.tree import Draft

__all__ = ["Settled", "settle"]


@dataclass(slots=True, eq=False)
class Settled:
    """The rows of a draft, level by level, the root first; siblings are beside each other, by rank.

    Attributes:
        parents, depths: one per row.
        chances: per row, probability that it is right where its parent is.
        levels: for each level below the root, the rows behind which it is guessed.
        draft: with the rows' tokens, once they are drafted.
    """

    parents: list[int]
    depths: list[int]
    chances: list[float]
    levels: list[list[int]]
    draft: Draft | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """Of the rows; waits for a device where the engine has not read them."""
        return () if self.draft is None else self.draft.on_host().tokens

    def children(self, row: int) -> list[int]:
        """The rows behind a row, the first rank first."""
        return [child for child in range(row + 1, len(self.parents)) if self.parents[child] == row]

    def promised(self, row: int) -> float:
        """0, as the chances that the head gives are not read."""
        return 0.0


def settle(
    shares: Sequence[float],
    most: int,
    deepest: int,
    *,
    width: int,
    least: Sequence[float] | None,
    gain: Callable[[Sequence[float], int], float] | None,
    keep: Callable[[Sequence[float]], int],
) -> Settled:
    """The shape of a draft; it has at least one row below the root, as nothing would be learned without.

    Args:
        shares: by rank, the chance of a child.
        most: most rows below the root.
        deepest: most levels.
        width: most rows of a level that are guessed behind.
        least: the least reach with which the row after 0, 1, ... others can pay; None where no row has to.
        gain: returns the net gain in tokens, given the rows' reaches and the number of levels; None keeps all levels.
        keep: how many rows pay, given their reaches, the largest first.
    """
    tree, usual, extended = ScoredTree(), [*enumerate(shares)], Counter[int]()

    def guesses(row: int) -> Guesses:
        extended[tree.depths[row]] += 1
        return usual if extended[tree.depths[row]] <= width else ()

    tree.grow(guesses, most, deepest, least)
    if len(tree) == 1:
        tree.add(0, *usual[0])
    rows = sorted(range(1, len(tree)), key=tree.reach.__getitem__, reverse=True)
    if gain is not None:
        gains = list[float]()
        for levels in range(1, 1 + max(tree.depths)):
            gains.append(gain([tree.reach[row] for row in rows if tree.depths[row] <= levels], levels))
        levels = 1 + gains.index(max(gains))
        rows = [row for row in rows if tree.depths[row] <= levels]
    return _by_level(tree, rows[: max(1, keep([tree.reach[row] for row in rows]))])


def _by_level(tree: ScoredTree, rows: Sequence[int]) -> Settled:
    """The shape of some rows of a tree, whose tokens are ranks; each row's parent is among them."""
    found, places = Settled([-1], [0], [1.0], []), {0: 0}
    for depth in range(1, 1 + max(tree.depths[row] for row in rows)):
        level = [row for row in rows if tree.depths[row] == depth]
        level.sort(key=lambda row: (places[tree.parents[row]], tree.tokens[row]))
        for row in level:
            places[row] = len(found.parents)
            found.parents.append(places[tree.parents[row]])
            found.depths.append(depth)
            found.chances.append(tree.chances[row])
        found.levels.append(sorted({places[tree.parents[row]] for row in level}))
    return found
