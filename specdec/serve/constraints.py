"""Grammars around a grammar: texts with a least length."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from specdec.sampling.grammar import Grammar, Matcher

if TYPE_CHECKING:
    import torch

__all__ = ["AtLeast"]


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
