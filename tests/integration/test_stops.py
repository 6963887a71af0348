"""Every end cuts a block exactly where plain decoding would have stopped: EOS, stop strings, budget, context."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from specdec import Drafter, Engine, SamplingParams, Step
from specdec.models.transformers_target import TransformersTarget
from tests.fakes import Oracle, Spy
from tests.models import greedy, live, model_of, new_model, prompt_of, reference, target_of

FAMILY = "mistral"
PROMPT = prompt_of(7)
NEW = 40
BLOCK = 5  # offsets 0 .. 2 * BLOCK meet every place in a block of a steady oracle
TEXT_PROMPT = 'def read(path):\n    """Read a file."""\n    with open(path) as file:\n'
VARIED = SamplingParams(repetition_penalty=1.3)  # greedy without loops: every stop string has one place


def oracle(steady: bool = True) -> Drafter:
    """A drafter whose every draft is right, so that nothing but the end cuts a block."""
    return Oracle([*PROMPT, *greedy(FAMILY, PROMPT, NEW)], 32, deepest=BLOCK - 1, steady=steady)


class Letters:
    """A tokenizer of one letter per token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


def ending_with(*eos: int) -> TransformersTarget:
    """The family's target with other end tokens."""
    target = copy.copy(target_of(FAMILY))
    target.eos_ids = frozenset(eos)
    return target


def test_oracle_fills_its_blocks() -> None:
    out = Engine(target_of(FAMILY), None, oracle()).generate(PROMPT, NEW)
    assert out.stats.acceptance_lengths == [BLOCK] * (NEW // BLOCK)


@pytest.mark.few(7)
@pytest.mark.parametrize("at", range(2 * BLOCK + 1))
def test_eos_at_every_offset(at: int) -> None:
    text = greedy(FAMILY, PROMPT, NEW)
    expected = reference(model_of(FAMILY), PROMPT, NEW, eos_token_id=text[at])
    assert expected == text[: text.index(text[at]) + 1]
    for drafter in (oracle(), oracle(steady=False)):
        out = Engine(ending_with(text[at]), None, drafter).generate(PROMPT, NEW)
        assert out.token_ids == expected
        assert out.finish_reason == "eos"
        assert sum(out.stats.acceptance_lengths) == len(expected)


@pytest.mark.few(4)
@pytest.mark.parametrize("at", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK])
def test_stop_tokens_end_a_text_as_end_tokens_do(at: int) -> None:
    """Beside the model's own, inside a block, in every way to decode."""
    text = greedy(FAMILY, PROMPT, NEW)
    expected = text[: text.index(text[at]) + 1]
    other = next(token for token in range(32) if token not in text)
    engine = Engine(ending_with(other), Letters(), oracle())
    for stops in (text[at], [text[at]], {text[at], other}):
        out = engine.generate(PROMPT, NEW, stop_token_ids=stops)
        assert (out.token_ids, out.finish_reason) == (expected, "stop")
    (last,) = [chunk for chunk in engine.stream(PROMPT, NEW, stop_token_ids=text[at]) if chunk.finish_reason]
    assert (last.token_ids[-1], last.finish_reason) == (text[at], "stop")
    both = engine.generate_batch([PROMPT] * 2, NEW, stop_token_ids=[[text[at]], []])
    assert [(one.token_ids, one.finish_reason) for one in both] == [(expected, "stop"), (text, "length")]
    streamed: list[list[int]] = [[], []]
    for place, chunk in engine.stream_batch([PROMPT] * 2, NEW, stop_token_ids=text[at]):
        streamed[place] += chunk.token_ids
    assert streamed == [expected] * 2
    also = Engine(ending_with(text[at]), None, oracle()).generate(PROMPT, NEW, stop_token_ids=text[at])
    assert (also.token_ids, also.finish_reason) == (expected, "eos")


def test_eos_ids_of_config_and_generation_config() -> None:
    model = new_model(FAMILY, eos_token_id=[3, 4])
    assert TransformersTarget(model).eos_ids == {3, 4}
    model.generation_config.eos_token_id = 5
    assert TransformersTarget(model).eos_ids == {5}
    model.generation_config.eos_token_id = None
    assert TransformersTarget(model).eos_ids == {3, 4}
    assert target_of(FAMILY).eos_ids == frozenset()


def test_budget_at_every_offset() -> None:
    text = greedy(FAMILY, PROMPT, NEW)
    for drafter in (oracle(), oracle(steady=False)):
        engine = Engine(target_of(FAMILY), None, drafter)
        for budget in range(1, 2 * BLOCK + 2):
            out = engine.generate(PROMPT, budget)
            assert out.token_ids == text[:budget]
            assert out.finish_reason == "length"
            assert out.stats.new_tokens == budget


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", FAMILY])
def test_context_ends_inside_a_block(family: str) -> None:
    text = greedy(family, PROMPT, NEW)
    for context in range(len(PROMPT) + 1, len(PROMPT) + 2 * BLOCK + 2):
        target = copy.copy(target_of(family))
        target.context_length = context
        out = Engine(target, None, oracle() if family == FAMILY else "none").generate(PROMPT, NEW)
        assert out.token_ids == text[: context - len(PROMPT)]
        assert out.finish_reason == "context"


def test_context_length_is_the_models() -> None:
    assert target_of(FAMILY).context_length == 256
    small = TransformersTarget(new_model(FAMILY, max_position_embeddings=48))
    out = Engine(small, None, "lookahead").generate(prompt_of(40), 100)
    assert len(out.token_ids) == 8
    assert out.token_ids == greedy(FAMILY, prompt_of(40), NEW)[:8]
    assert out.finish_reason == "context"


def test_budget_that_ends_with_the_context_is_the_budget() -> None:
    target = copy.copy(target_of(FAMILY))
    target.context_length = len(PROMPT) + 9
    assert Engine(target).generate(PROMPT, 9).finish_reason == "length"


def cut_by_hand(engine: Engine, tokens: list[int], stop: str) -> tuple[list[int], str]:
    """The tokens up to the one that completes ``stop``, and the text before it."""
    assert engine.tokenizer is not None
    for count in range(1, len(tokens) + 1):
        text = engine.tokenizer.decode(tokens[:count])
        if stop in text:
            return tokens[:count], text[: text.index(stop)]
    raise AssertionError(f"{stop!r} is not in the text")


def stops_in(text: str) -> list[str]:
    """Distinct strings of 1 to 9 characters from all over the text."""
    sizes = itertools.cycle((1, 4, 2, 9, 3))
    return list(
        dict.fromkeys(text[at : at + size] for at, size in zip(range(0, len(text) - 9, 3), sizes, strict=False))
    )


@pytest.mark.slow
@pytest.mark.parametrize("steady", [True, False])
def test_stop_strings_at_every_offset(tiny_engine: Engine, steady: bool) -> None:
    plain = tiny_engine.generate(TEXT_PROMPT, NEW, VARIED)
    prompt = tiny_engine.encode(TEXT_PROMPT)
    engine = tiny_engine.with_drafter(Oracle([*prompt, *plain.token_ids], 4096, deepest=BLOCK - steady, steady=steady))
    offsets = set[int]()
    for stop in stops_in(plain.text):
        tokens, text = cut_by_hand(tiny_engine, plain.token_ids, stop)
        steps: list[Step] = []
        out = engine.generate(TEXT_PROMPT, NEW, VARIED, stop=stop, on_step=steps.append)
        assert out.token_ids == tokens, stop
        assert out.text == text
        assert out.finish_reason == "stop"
        assert sum(len(step.tokens) for step in steps) == len(tokens)
        offsets.add(len(tokens) % BLOCK)
    assert offsets == set(range(BLOCK)), "some offset in a block was not met"


@pytest.mark.slow
def test_stop_strings_as_transformers(tiny_engine: Engine) -> None:
    plain = tiny_engine.generate(TEXT_PROMPT, NEW, VARIED)
    prompt = tiny_engine.encode(TEXT_PROMPT)
    for stop in stops_in(plain.text)[::6]:
        expected = reference(
            live(tiny_engine.target),
            prompt,
            NEW,
            stop_strings=[stop],
            tokenizer=tiny_engine.tokenizer,
            repetition_penalty=VARIED.repetition_penalty,
        )
        out = tiny_engine.with_drafter("prompt_lookup").generate(TEXT_PROMPT, NEW, VARIED, stop=stop)
        assert out.token_ids == expected


@pytest.mark.slow
def test_earliest_of_several_stop_strings(tiny_engine: Engine) -> None:
    plain = tiny_engine.generate(TEXT_PROMPT, NEW, VARIED)
    middle, late = plain.text[20:24], plain.text[50:58]
    _, text = cut_by_hand(tiny_engine, plain.token_ids, middle)
    assert late not in text
    assert tiny_engine.generate(TEXT_PROMPT, NEW, VARIED, stop=[late, middle]).text == text


@pytest.mark.slow
def test_stop_string_that_never_comes(tiny_engine: Engine) -> None:
    plain = tiny_engine.generate(TEXT_PROMPT, NEW, VARIED)
    out = tiny_engine.with_drafter("lookahead").generate(TEXT_PROMPT, NEW, VARIED, stop="\0never")
    assert (out.token_ids, out.text, out.finish_reason) == (plain.token_ids, plain.text, "length")


@pytest.mark.slow
def test_stop_strings_do_not_look_at_the_prompt(tiny_engine: Engine) -> None:
    plain = tiny_engine.generate(TEXT_PROMPT, NEW, VARIED)
    stop = TEXT_PROMPT[-8:]
    assert stop not in plain.text
    assert tiny_engine.generate(TEXT_PROMPT, NEW, VARIED, stop=stop).token_ids == plain.token_ids


def test_cache_and_text_agree_after_a_cut() -> None:
    """A cut block commits the rows before the cut and no more, so the sequence could go on."""
    text = greedy(FAMILY, PROMPT, NEW)
    target = target_of(FAMILY)
    for budget in range(1, 2 * BLOCK):
        spy = Spy(oracle(steady=False))
        Engine(target, None, spy).generate(PROMPT, budget)
        assert spy.context.tokens == [*PROMPT, *text[:budget]]
        assert spy.context.cache.length == len(spy.context.tokens) - 1
