"""Structured output: logits processors with a state that follows the tree of a draft.

A processor in transformers' form reads a whole text and starts anew for every row. A *grammar* has a state after each
text: :class:`Grammar` returns the state after the prompt, and :meth:`Matcher.advance` the state after one more token.
States are values: the rows of a step branch, so one state has several next states, most of which are thrown away.

Pass it as a processor: ``engine.generate(prompt, logits_processor=[grammar])``. Where a library's matcher changes in
place (llguidance, outlines), ``advance`` copies it first: ``other = matcher.deep_copy(); other.consume_token(token)``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import torch

__all__ = ["Ended", "Grammar", "Matcher", "States"]


class Matcher(Protocol):
    """A grammar's state after a text: which tokens may follow."""

    def advance(self, token: int) -> Matcher | None:
        """The state after one more token, or None where the token may not follow; this state is not changed.

        A draft may hold tokens that may not follow; they are never accepted. It may also hold the end token, and then
        one more token is asked for behind it: the state behind an end is one such as :class:`Ended`.
        """

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] with -inf for every token that may not follow; an end-of-sequence token is one of them.

        Other scores must not change: for a model on a device the mask is computed from dummy scores on the host.
        """


@runtime_checkable
class Grammar(Protocol):
    """A schema compiled for a tokenizer; sequences share it."""

    def start(self, prompt: Sequence[int]) -> Matcher:
        """The state after the prompt, of a new text."""


class Ended:
    """The state behind the end of a text: only end tokens may follow.

    Args:
        ends: the end tokens; at least one.
    """

    def __init__(self, ends: Collection[int]) -> None:
        self._ends = list(ends)

    def advance(self, token: int) -> Ended | None:
        return self if token in self._ends else None

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(scores, -math.inf)
        masked[:, self._ends] = scores[:, self._ends]
        return masked


class States:
    """One sequence's states: after its text, and after paths of the current step's draft."""

    def __init__(self, grammar: Grammar, prompt: Sequence[int]) -> None:
        self.grammar = grammar
        self._length = len(prompt)
        self._known: dict[tuple[int, ...], Matcher | None] = {(): grammar.start(prompt)}

    def after(self, tokens: Sequence[int], path: Sequence[int]) -> Matcher | None:
        """The state after the text and ``path``; None if a token of the path may not be there."""
        if len(tokens) > self._length:  # the text has grown; states of other paths are not needed any more
            self._known = {(): self._after(tuple(tokens[self._length :]))}
            self._length = len(tokens)
        return self._after(tuple(path))

    def process(self, tokens: Sequence[int], path: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Masked scores [1, V] after the text and ``path``; unmasked if a token of the path may not be there."""
        state = self.after(tokens, path)
        return scores if state is None else state.mask(scores)

    def _after(self, path: tuple[int, ...]) -> Matcher | None:
        if path not in self._known:
            before = self._after(path[:-1])
            self._known[path] = None if before is None else before.advance(path[-1])
        return self._known[path]
