"""Growth: the guesses of a step as a tree, with the children of each row."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.shared.scored_tree import Guesses, ScoredTree

__all__ = ["Growth"]


class Growth(ScoredTree):
    """All guesses of a head in a step, verified or not.

    Attributes:
        below: row -> its children, likeliest first, for rows with guesses behind them.
        promises: row -> chance that the head gave its likeliest child, for rows that were extended.
    """

    __slots__ = ("below", "promises")

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.below = dict[int, list[int]]()
        self.promises = dict[int, float]()

    def children(self, row: int) -> Sequence[int]:
        """The guesses behind a row, likeliest first."""
        return self.below.get(row, ())

    def promised(self, row: int) -> float:
        """The chance that the head gave a row's likeliest child; 0 if it gave none."""
        return self.promises.get(row, 0.0)

    def extend(self, row: int, guesses: Guesses, share: float) -> None:
        """Add guesses behind a row; their chances are multiplied by ``share``."""
        first = len(self)
        for token, chance in guesses:
            self.add(row, token, min(1.0, share * chance))
        if guesses:
            self.below[row] = [*range(first, len(self))]

    def best(self, most: int) -> list[int]:
        """At most ``most`` rows below the root, most likely to be reached first, so parents precede children."""
        return sorted(range(1, len(self)), key=self.reach.__getitem__, reverse=True)[:most]
