"""Growth: the guesses of a step as a tree, and which of them are behind which."""

from __future__ import annotations

from drafters.shared.scored_tree import Guesses, ScoredTree

__all__ = ["Growth"]


class Growth(ScoredTree):
    """All that a head guessed in a step, verified or not.

    Attributes:
        below: of a row that was guessed behind its children, likeliest first.
    """

    __slots__ = ("below",)

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.below = dict[int, list[int]]()

    def extend(self, row: int, guesses: Guesses, share: float) -> None:
        """Put guesses behind a row; ``share``: of each chance that is believed."""
        first = len(self)
        for token, chance in guesses:
            self.add(row, token, min(1.0, share * chance))
        if guesses:
            self.below[row] = [*range(first, len(self))]

    def best(self, most: int) -> list[int]:
        """The likeliest rows below the root to be reached, parents before children."""
        return sorted(range(1, len(self)), key=self.reach.__getitem__, reverse=True)[:most]
