"""Structured output: logits processors that know a state, which is carried along a tree of drafts.

A processor in transformers' form sees a whole text and starts anew with every row. A *grammar* has a state after each
text: :class:`Grammar` gives the one after the prompt, and :meth:`Matcher.advance` the next. States are values: a step's
rows branch, so a state is asked for several next ones, and most of them are thrown away.

Give it where processors go: ``engine.generate(prompt, logits_processor=[grammar])``. Around a library whose matcher
changes in place (xgrammar, outlines), ``advance`` forks it first:
``other = matcher.fork(); other.accept_token(token)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

__all__ = ["Grammar", "Matcher", "States"]


class Matcher(Protocol):
    """A state: what may follow."""

    def advance(self, token: int) -> Matcher | None:
        """The state after one more token, this one being left as it is; None where the token may not follow.

        A draft may hold such tokens; they are never accepted.
        """

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] with -inf for every token that may not follow; an end-of-sequence token is one of them.

        Nothing else may change: for a model on a device the mask is read off other scores, which are on the host.
        """


@runtime_checkable
class Grammar(Protocol):
    """What sequences share: a schema, compiled for a tokenizer."""

    def start(self, prompt: Sequence[int]) -> Matcher:
        """The state after the prompt, of a new text."""


class States:
    """A sequence's states: after its text, and after the paths that a step has looked at."""

    def __init__(self, grammar: Grammar, prompt: Sequence[int]) -> None:
        self.grammar = grammar
        self._length = len(prompt)
        self._known: dict[tuple[int, ...], Matcher | None] = {(): grammar.start(prompt)}

    def after(self, tokens: Sequence[int], path: Sequence[int]) -> Matcher | None:
        """The state after the text and ``path``; None behind a token that may not be there."""
        if len(tokens) > self._length:  # the text has gone on, and only what follows it is asked for from now on
            self._known = {(): self._after(tuple(tokens[self._length :]))}
            self._length = len(tokens)
        return self._after(tuple(path))

    def process(self, tokens: Sequence[int], path: Sequence[int], scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] after the text and ``path``; as they are behind a token that may not be there."""
        state = self.after(tokens, path)
        return scores if state is None else state.mask(scores)

    def _after(self, path: tuple[int, ...]) -> Matcher | None:
        if path not in self._known:
            before = self._after(path[:-1])
            self._known[path] = None if before is None else before.advance(path[-1])
        return self._known[path]
