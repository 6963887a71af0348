"""Log-probabilities of a prompt: it is generated from its first token on, under a grammar that forces it.

Log-probabilities are those before grammars, and the prompt is its own prediction, so it takes few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from specdec.sampling.grammar import Grammar, Matcher

if TYPE_CHECKING:
    import torch

__all__ = ["Anything", "PromptFirst", "ends_behind"]


class Anything:
    """The grammar of all texts, and its only state."""

    def start(self, prompt: Sequence[int]) -> Anything:
        return self

    def advance(self, token: int) -> Anything:
        return self

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        return scores


class PromptFirst:
    """A grammar of a prompt without its first token, and of an answer behind it.

    Args:
        prompt: the whole prompt.
        grammar: the answer's.
    """

    def __init__(self, prompt: Sequence[int], grammar: Grammar) -> None:
        self.prompt, self._grammar = prompt, grammar

    def start(self, prompt: Sequence[int]) -> Matcher:
        return _Forced(self, len(prompt)) if len(prompt) < len(self.prompt) else self.behind()

    def behind(self) -> Matcher:
        """The state behind the prompt."""
        return self._grammar.start(self.prompt)


class _Forced:
    """The state behind ``place`` tokens of the prompt."""

    def __init__(self, of: PromptFirst, place: int) -> None:
        self._of, self._place = of, place

    def advance(self, token: int) -> Matcher | None:
        if token != self._of.prompt[self._place]:
            return None
        place = self._place + 1
        return _Forced(self._of, place) if place < len(self._of.prompt) else self._of.behind()

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        token = self._of.prompt[self._place]
        masked = scores.new_full(scores.shape, -math.inf)
        masked[:, token] = scores[:, token]
        return masked


def ends_behind(length: int, ends: Collection[int]) -> Callable[[Sequence[int]], bool]:
    """Whether a text ends with its last token: one of ``ends`` that stands behind a prompt of ``length`` tokens."""
    return lambda tokens: len(tokens) > length and tokens[-1] in ends
