"""Texts that a grammar allows, without a model: of one given, and at random."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from specdec.serve.json_grammar import Grammars, JsonGrammar

__all__ = ["accepts", "tokens_of", "walk"]


def tokens_of(grammars: Grammars, text: str) -> list[int]:
    """The tokens of a text, as the grammar's tokenizer splits it."""
    return list(grammars.tokenizer.tokenize_str(text))


def accepts(grammars: Grammars, grammar: JsonGrammar | None, text: str) -> bool:
    """Whether the text is a whole one of the grammar."""
    assert grammar is not None
    state: Any = grammar.start([])
    for token in tokens_of(grammars, text):
        state = state.advance(token)
        if state is None:
            return False
    return state.advance(min(grammars.ends)) is not None


@cache
def _closing(tokenizer: Any) -> set[int]:
    """Tokens that close strings, lists and objects, or are parts of numbers."""
    size = tokenizer.vocab_size
    return {token for token in range(size) if set(tokenizer.decode_str([token])) <= set('"}],:0123456789')}


def walk(grammars: Grammars, grammar: JsonGrammar | None, dice: random.Random, most: int = 160) -> str | None:
    """A random text of the grammar, which tends to its end; None where it has not ended within ``most`` tokens."""
    assert grammar is not None
    state: Any = grammar.start([])
    tokenizer, end = grammars.tokenizer, min(grammars.ends)
    found: list[int] = []
    while len(found) < most:
        masked = state.mask(torch.zeros(1, grammars.size))[0]
        allowed = [token for token in (masked == 0).nonzero()[:, 0].tolist() if token not in grammars.ends]
        if state.advance(end) is not None and (dice.random() < 0.5 or not allowed):
            return tokenizer.decode_bytes(found).decode()
        assert allowed, f"nothing may follow {tokenizer.decode_str(found)!r}"
        closing = [token for token in allowed if token in _closing(tokenizer)]
        few = closing and dice.random() < (0.3 if len(found) < most / 4 else 0.8)
        token = dice.choice(closing if few else allowed)
        state = state.advance(token)
        found.append(token)
    return None
