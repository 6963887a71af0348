"""Ranks: how often the first, second, ... of a drafter's guesses was right in a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from drafters.shared.calibration import Calibration

__all__ = ["Ranks"]


class Ranks:
    """The shares of rows whose first, second, ... child was accepted, in one text.

    Args:
        most: most children of a row.
        accepted: prior share of the first child; each further child has this share of the remainder.
        weight: weight of the prior, in rows.
    """

    def __init__(self, most: int, accepted: float, weight: float) -> None:
        self._records = [Calibration(accepted * (1 - accepted) ** rank * weight, weight) for rank in range(most)]

    @property
    def shares(self) -> list[float]:
        """For each rank, at most the share of the rank before."""
        return [*accumulate((record.share for record in self._records), min)]

    def behind(self, likely: float) -> list[float]:
        """The chances of a row's children, where the head gives its likeliest token the chance ``likely``.

        Where the head is surer than usual, less is left for the children behind the first.
        """
        shares = self.shares
        first = (likely + shares[0]) / 2
        rest = (1 - first) / (1 - shares[0])
        return [first, *(min(first, rest * share) for share in shares[1:])]

    def learn(self, children: Sequence[int], token: int) -> None:
        """Record that ``token`` followed a row with these children."""
        for record, child in zip(self._records, children, strict=False):
            record.learn(1, child == token)
