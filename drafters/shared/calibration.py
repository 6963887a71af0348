"""Calibration: how far a drafter's own chances are believed, by what became of the guesses that it promised."""

from __future__ import annotations

__all__ = ["Calibration"]


class Calibration:
    """Guesses that were right, for one that was promised.

    A chance of 0.7 promises 0.7 guesses. Where two in three of such promises are kept, chances are worth two thirds of
    what they say.

    Args:
        right: guesses that are supposed to have been right before any was seen.
        promised: those that were promised then.
        memory: weight of the past, from one :meth:`learn` to the next.
    """

    __slots__ = ("_memory", "_promised", "_right")

    def __init__(self, right: float, promised: float, memory: float = 1.0) -> None:
        self._right, self._promised, self._memory = right, promised, memory

    @property
    def share(self) -> float:
        """What a promised guess is worth; above 1 where more came than was promised."""
        return self._right / self._promised

    def learn(self, promised: float, right: float) -> None:
        """Note that ``right`` guesses were right, of guesses whose chances add up to ``promised``."""
        self._right = self._memory * self._right + right
        self._promised = self._memory * self._promised + promised
