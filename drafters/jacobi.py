"""Jacobi decoding: guess the next tokens, feed them, take the target's answers as the next guess.

Song et al. 2021, "Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving"; Santilli et al. 2023.
It equals lookahead decoding with n-grams of two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.draft import Draft
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError

__all__ = ["Jacobi", "JacobiConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JacobiConfig:
    """Options.

    Attributes:
        guesses: positions guessed after the root; None fits the device: 4 on an accelerator, 1 on a CPU, where a row
            costs more than a second guess brings.
    """

    guesses: int | None = None

    def __post_init__(self) -> None:
        if self.guesses is not None and self.guesses < 1:
            raise ConfigError(f"jacobi.guesses is {self.guesses}; it must be at least 1")


class Jacobi(DrafterBase):
    """A chain that is the target's own last answer."""

    name = "jacobi"
    Config = JacobiConfig

    def start(self, context: Context) -> JacobiSession:
        return JacobiSession(self.config, context)


class JacobiSession:
    def __init__(self, config: JacobiConfig, context: Context) -> None:
        self._guesses = config.guesses or (1 if context.target.device.type == "cpu" else 4)
        self._context = context
        self._guess: list[int] = []

    def propose(self, room: int) -> Draft:
        context = self._context
        size = min(self._guesses, room - 1, context.remaining - 1)
        while len(self._guess) < size:
            self._guess.append(context.rng.choice(context.tokens))
        return Draft.chain([context.root, *self._guess[:size]])

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        # The answer after row i is a guess for the position below it; rows that were accepted have served.
        rows = range(len(seen.path), len(seen.draft))
        self._guess = [seen.argmax(row) for row in rows if row not in seen.draft.probes]
