"""Grammars around a grammar: texts with a least length, and texts behind a prompt that is generated, too.

Log-probabilities of a prompt are those of generating it from its first token on, under a grammar that forces it: they
are taken before grammars. The prompt is its own prediction, so it takes few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from specdec.sampling.grammar import Grammar, Matcher

if TYPE_CHECKING:
    import torch

__all__ = ["Anything", "AtLeast", "PromptFirst", "ends_behind"]


class AtLeast:
    """A grammar whose texts do not end before ``least`` tokens, unless nothing but an end may follow.

    Args:
        grammar: the grammar of the text.
        least: tokens before which no end token is chosen.
        closing: the tokens that end the text.
    """

    def __init__(self, grammar: Grammar, least: int, closing: Collection[int]) -> None:
        self._grammar, self._least, self._closing = grammar, least, list(closing)

    def start(self, prompt: Sequence[int]) -> AtLeastState:
        return AtLeastState(self._grammar.start(prompt), self._least, self._closing)


class AtLeastState:
    """The state of a text that is to have ``left`` more tokens."""

    def __init__(self, inner: Matcher, left: int, closing: list[int]) -> None:
        self._inner, self._left, self._closing = inner, left, closing

    def advance(self, token: int) -> AtLeastState | None:
        inner = self._inner.advance(token)
        return None if inner is None else AtLeastState(inner, self._left - 1, self._closing)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        masked = self._inner.mask(scores)
        if self._left <= 0:
            return masked
        longer = masked.clone()
        longer[:, self._closing] = -math.inf
        return masked if bool((longer == -math.inf).all()) else longer


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
