"""Calibration: a factor on a drafter's probabilities, learned from how many of its guesses were right."""

from __future__ import annotations

__all__ = ["Calibration"]


class Calibration:
    """Number of right guesses per expected right guess.

    A guess of probability 0.7 is 0.7 expected right guesses. If two thirds of the expected number are right,
    probabilities are multiplied by two thirds.

    Args:
        right: prior number of right guesses.
        promised: prior number of expected right guesses.
        memory: weight of the past, from one :meth:`learn` to the next.
    """

    __slots__ = ("_memory", "_promised", "_right")

    def __init__(self, right: float, promised: float, memory: float = 1.0) -> None:
        self._right, self._promised, self._memory = right, promised, memory

    @property
    def share(self) -> float:
        """The factor on probabilities; above 1 if more guesses were right than expected."""
        return self._right / self._promised

    def learn(self, promised: float, right: float) -> None:
        """Record that ``right`` guesses were right, of guesses whose probabilities add up to ``promised``."""
        self._right = self._memory * self._right + right
        self._promised = self._memory * self._promised + promised
