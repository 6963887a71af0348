"""Jacobi decoding: guess the next tokens, feed them, take the target's answers as the next guess.

Song et al. 2021, "Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving"; Santilli et al. 2023.
It equals lookahead decoding with n-grams of two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.costs.curve import CostCurve
from specdec.costs.prices import Prices
from specdec.drafter import Context, DrafterBase, Observation
from specdec.settings.parsing import check_positive
from specdec.step.tree import Draft

__all__ = ["Jacobi", "JacobiConfig", "guesses_for"]

_RIGHT, _MOST = 0.1, 4  # the embedded model's guesses are right one time in twelve, however many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiConfig:
    """Options.

    Attributes:
        guesses: positions guessed after the root; None follows from what rows cost, see :func:`guesses_for`.
    """

    guesses: int | None = None

    def __post_init__(self) -> None:
        check_positive("jacobi.", guesses=self.guesses)


def guesses_for(costs: CostCurve, length: int) -> int:
    """The number of guesses, 1 to 4, with the most expected tokens per second after ``length`` tokens.

    It assumes that a guess is right with probability 0.1 if the guesses before it are: g guesses give
    ``1 + .1 + ... + .1 ** g`` tokens in the time of 1 + g rows. So a second guess is made only where rows are free.
    """
    return Prices(costs).fastest([_RIGHT**guess for guess in range(1, _MOST + 1)], length)


class Jacobi(DrafterBase):
    """A chain that is the target's own last answer."""

    name = "jacobi"
    draws = False
    Config = JacobiConfig

    def start(self, context: Context) -> JacobiSession:
        return JacobiSession(self.config, context)


class JacobiSession:
    def __init__(self, config: JacobiConfig, context: Context) -> None:
        self._guesses = config.guesses or guesses_for(context.costs, context.prompt_length)
        self._context = context
        self._guess: list[int] = []

    def propose(self, row_budget: int) -> Draft:
        context = self._context
        size = min(self._guesses, row_budget - 1, context.remaining - 1)
        while len(self._guess) < size:
            self._guess.append(context.rng.choice(context.tokens))
        return Draft.chain([context.root, *self._guess[:size]])

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        # The answer after row i is a guess for the position below it; rows that were accepted have served.
        rows = range(len(seen.path), len(seen.draft))
        self._guess = [seen.argmax(row) for row in rows if row not in seen.draft.probes]
