"""Grammars of JSON, without a model: what may follow a text, its end, and the end of it once more."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from specdec import Engine
from specdec.sampling.grammar import Grammar, Matcher
from specdec.serve.constraints import AtLeast
from specdec.serve.json_grammar import Grammars

OK: dict[str, Any] = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
OK["additionalProperties"] = False


@pytest.fixture(scope="module")
def grammars(tiny_engine: Engine) -> Grammars:
    return Grammars(tiny_engine.tokenizer, tiny_engine.target.vocab_size, tiny_engine.target.eos_ids)


def after(grammar: Grammar, tokens: list[int]) -> Matcher:
    state: Matcher | None = grammar.start([])
    for token in tokens:
        assert state is not None
        state = state.advance(token)
    assert state is not None
    return state


def allowed(state: Matcher, size: int) -> set[int]:
    scores = torch.arange(size, dtype=torch.float32)[None]
    masked = state.mask(scores)
    kept = masked != -math.inf
    assert torch.equal(masked[kept], scores[kept])
    return set(kept[0].nonzero()[:, 0].tolist())


@pytest.fixture(scope="module")
def text(tiny_engine: Engine, grammars: Grammars) -> list[int]:
    """The tokens of the one text of the grammar ``OK``, as the grammar lets them be."""
    state: Matcher | None = grammars.of(OK).start([])
    found: list[int] = []
    while True:
        assert state is not None
        token = max(
            allowed(state, tiny_engine.target.vocab_size), key=lambda one: len(tiny_engine.tokenizer.decode(one))
        )
        if token in tiny_engine.target.eos_ids:
            return found
        found.append(token)
        state = state.advance(token)


def test_behind_the_end_only_end_tokens_follow(tiny_engine: Engine, grammars: Grammars, text: list[int]) -> None:
    ends, size = tiny_engine.target.eos_ids, tiny_engine.target.vocab_size
    end = min(ends)
    for count in range(3):
        state = after(grammars.of(OK), [*text, *[end] * count])
        assert allowed(state, size) == ends
        assert state.advance(text[0]) is None
        assert state.advance(end) is not None


def test_a_text_that_can_go_on_does_until_it_has_its_least_tokens(tiny_engine: Engine, grammars: Grammars) -> None:
    ends, size = tiny_engine.target.eos_ids, tiny_engine.target.vocab_size
    digit = tiny_engine.tokenizer.encode("1", add_special_tokens=False)
    for least, may_end in ((1, True), (2, False)):
        state = after(AtLeast(grammars.of({"type": "integer"}), least, ends), digit)
        assert (ends <= allowed(state, size)) is may_end
        assert allowed(state, size) - ends
    assert state.advance(size - 1) is None


def test_a_text_that_cannot_go_on_ends_early(tiny_engine: Engine, grammars: Grammars, text: list[int]) -> None:
    ends, size = tiny_engine.target.eos_ids, tiny_engine.target.vocab_size
    grammar = AtLeast(grammars.of(OK), len(text) + 5, ends)
    assert allowed(after(grammar, text), size) == ends
    assert allowed(after(grammar, [*text, min(ends)]), size) == ends
