"""Exact probabilities of a random procedure: run it once for every sequence of its choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """The choices of one run: those on record are repeated, then every new one takes its first possible outcome."""

    def __init__(self, trail: list[tuple[int, Sequence[float]]]) -> None:
        self._trail = trail
        self._made = 0
        self.weight = 1.0

    def pick(self, weights: Sequence[float]) -> int:
        """An outcome; its probability is ``weights[outcome]``, and impossible ones are left out."""
        if self._made == len(self._trail):
            self._trail.append((_next(weights, 0), weights))
        outcome, _ = self._trail[self._made]
        self._made += 1
        self.weight *= weights[outcome]
        return outcome

    def coin(self, heads: float) -> bool:
        """True with probability ``heads``."""
        return self.pick((heads, 1 - heads)) == 0


def every(procedure: Callable[[Choices], T]) -> Iterator[tuple[T, float]]:
    """What the procedure returns, and the probability, for every possible sequence of choices."""
    trail: list[tuple[int, Sequence[float]]] = []
    while True:
        choices = Choices(trail)
        yield procedure(choices), choices.weight
        while trail:
            outcome, weights = trail.pop()
            following = _next(weights, outcome + 1)
            if following < len(weights):
                trail.append((following, weights))
                break
        if not trail:
            return


def _next(weights: Sequence[float], start: int) -> int:
    return next((i for i in range(start, len(weights)) if weights[i] > 0), len(weights))
