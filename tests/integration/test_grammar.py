"""Structured output: a grammar of JSON, a state per text, carried along trees of drafts and beside other sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from specdec import Engine, SamplingParams, TransformersTarget
from specdec.step import device_copies
from tests.fakes import Drawing, Oracle
from tests.models import VOCAB, new_model, prompt_of, reference
from tests.unit.third_party_grammar import JsonSchema, JsonState

ALPHABET = '  {}[]:,"ab012'  # token -> character; the first two are no JSON here
END = 20


@dataclass(frozen=True)
class Json:
    """What may follow a text of lists, objects, strings of a's and b's, and digits."""

    open: str = ""  # brackets that wait for their ends
    # top (a list or an object), value, item (or the end of a list), key (or the end), next, name, colon, string, after
    place: str = "top"

    def allowed(self) -> str:
        if self.place == "string" or self.place == "name":
            return 'ab"'
        if self.place == "after":
            return {"": "", "[": ",]", "{": ",}"}[self.open[-1:]]
        value = '{["012' if len(self.open) < 4 else '"012'
        return {"top": "{[", "value": value, "item": value + "]", "key": '"}', "next": '"', "colon": ":"}[self.place]

    def advance(self, token: int) -> Json | None:
        mark = ALPHABET[token] if token < len(ALPHABET) else ""
        if not mark or mark not in self.allowed():
            return None
        if mark in "[{":
            return Json(self.open + mark, "item" if mark == "[" else "key")
        if mark in "]}":
            return Json(self.open[:-1], "after")
        if mark == ",":
            return Json(self.open, "value" if self.open[-1] == "[" else "next")
        if mark == '"' and self.place in ("key", "next"):
            return Json(self.open, "name")
        if mark == '"':
            ends = {"string": "after", "name": "colon"}
            return Json(self.open, ends.get(self.place, "string"))
        return Json(self.open, "value" if mark == ":" else self.place if mark in "ab" else "after")

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        tokens = [ALPHABET.index(mark) for mark in self.allowed()]
        if not self.open and self.place == "after":
            tokens.append(END)
        masked = torch.full_like(scores, -torch.inf)
        masked[:, tokens] = scores[:, tokens]
        return masked


class Grammar:
    def __init__(self) -> None:
        self.started = 0

    def start(self, prompt: Sequence[int]) -> Json:
        self.started += 1
        return Json()


def stateless(prompt: Sequence[int]) -> Any:
    """The same as a processor that reads every text anew."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        state: Json | None = Json()
        for token in ids[0, len(prompt) :].tolist():
            state = None if state is None else state.advance(token)
        return scores if state is None else state.mask(scores)  # behind the end of a text, which a draft may go beyond

    return process


def text_of(tokens: Sequence[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens if token != END)


PROMPTS = [prompt_of(size) for size in (6, 18, 23)]
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=1.5, seed=4))


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(new_model("llama", eos_token_id=END))


def engine(target: TransformersTarget, drafter: Any) -> Engine:
    return Engine(target, None, drafter, max_rows=16)


def follows(tokens: Sequence[int]) -> bool:
    """Whether they begin a text of JSON, or are one where they end."""
    state: Json | None = Json()
    for token in tokens:
        if token == END:
            json.loads(text_of(tokens))
            return True
        state = None if state is None else state.advance(token)
    return state is not None


@pytest.mark.few(1)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_text_is_that_of_generate_under_the_grammar(target: TransformersTarget, prompt: tuple[int, ...]) -> None:
    expected = reference(target.model, prompt, 30, logits_processor=[stateless(prompt)], eos_token_id=END)
    assert len(set(expected)) > 4
    assert follows(expected)
    oracle = Oracle([*prompt, *expected], VOCAB)
    for drafter in ("none", "prompt_lookup", "lookahead", oracle):
        found = engine(target, drafter).generate(prompt, 30, logits_processor=[Grammar()])
        assert found.token_ids == expected, drafter
    assert found.stats.steps < len(expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: f"T={sampling.temperature}")
def test_states_of_several_sequences_do_not_mix(target: TransformersTarget, sampling: SamplingParams) -> None:
    """Each starts with its own prompt and goes on with its own text."""
    grammar, made = Grammar(), engine(target, "lookahead")
    found = made.generate_batch(PROMPTS, 25, sampling, batch=2, logits_processor=[grammar])
    assert grammar.started == len(PROMPTS)
    for prompt, one in zip(PROMPTS, found, strict=True):
        alone = made.generate(prompt, 25, sampling, logits_processor=[stateless(prompt)])
        assert one.token_ids == alone.token_ids
        assert follows(one.token_ids)


def test_drawn_drafts_that_break_the_grammar_are_rejected(target: TransformersTarget) -> None:
    """A draft may go on behind a token that may not be there; whatever is accepted is JSON."""
    q = torch.softmax(torch.randn(VOCAB, VOCAB, dtype=torch.float64), -1)
    for seed in range(4):
        sampling = SamplingParams(temperature=1.0, seed=seed)
        found = engine(target, Drawing(q, (2, 2))).generate(PROMPTS[0], 25, sampling, logits_processor=[Grammar()])
        assert follows(found.token_ids)


SCHEMA = """{"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "object", "required": ["name", "size"],
    "additionalProperties": false, "properties": {
        "name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "minimum": 0, "maximum": 99}}}}"""


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: f"T={sampling.temperature}")
def test_a_schema_by_another_library(tiny_engine: Engine, sampling: SamplingParams) -> None:
    grammar = JsonSchema(SCHEMA, tiny_engine.tokenizer, tiny_engine.target.vocab_size)
    plain, *others = (
        tiny_engine.with_drafter(name).generate_batch(
            ["config = ", "class Stack:\n"], 96, sampling, logits_processor=[grammar]
        )
        for name in ("none", "auto", "prompt_lookup", "lookahead")
    )
    for one in plain:
        assert one.finish_reason == "eos"
        assert [set(item) for item in json.loads(one.text)] == 3 * [{"name", "size"}]
    for found in others:
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert any(one.stats.steps < len(one.token_ids) for found in others for one in found)


@pytest.mark.slow
def test_on_a_device_masks_are_asked_for_on_the_host(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores that are none of the model's: such libraries refuse others, or make the device wait for a mask."""
    grammar = JsonSchema(SCHEMA, tiny_engine.tokenizer, tiny_engine.target.vocab_size)
    engine = tiny_engine.with_drafter("prompt_lookup")
    expected = engine.generate("config = ", 40, logits_processor=[grammar])
    mask = JsonState.mask

    def checked(state: JsonState, scores: torch.Tensor) -> torch.Tensor:
        assert torch.equal(scores, torch.ones_like(scores))
        return mask(state, scores)

    monkeypatch.setattr(JsonState, "mask", checked)
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)
    assert engine.generate("config = ", 40, logits_processor=[grammar]).token_ids == expected.token_ids
    assert expected.stats.steps < len(expected.token_ids)
