"""Settled: the shape of a draft that is decided before its tokens are known, so that a device is not read for it.

A row's chance is the share of tokens of its rank that were right in this text, behind rows that were right
(:class:`drafters.shared.ranks.Ranks`). So it does not depend on the guesses themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from drafters.heads.growth import Growth
from drafters.shared.scored_tree import Guesses, ScoredTree
from specdec.step.tree import Draft

__all__ = ["Settled", "settle"]


class Settled(Growth):
    """The rows of a draft, level by level, the root first; siblings are beside each other, by rank.

    Attributes:
        levels: for each level below the root, the rows behind which it is guessed.
        draft: with the rows' tokens, once they are drafted.
    """

    __slots__ = ("draft", "levels")

    def __init__(self) -> None:
        super().__init__(0)
        self.levels = list[list[int]]()
        self.draft: Draft | None = None


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
    found, places = Settled(), {0: 0}
    for depth in range(1, 1 + max(tree.depths[row] for row in rows)):
        level = [row for row in rows if tree.depths[row] == depth]
        level.sort(key=lambda row: (places[tree.parents[row]], tree.tokens[row]))
        for row in level:
            places[row], parent = len(found), places[tree.parents[row]]
            found.below.setdefault(parent, []).append(places[row])
            found.add(parent, 0, tree.chances[row])
        found.levels.append(sorted({places[tree.parents[row]] for row in level}))
    return found
