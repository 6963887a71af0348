"""Streams: the chunks add up to ``generate``'s text, whatever bytes a token splits, and leave the model free."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import Chunk, Engine, SamplingParams
from specdec.engine.text_stream import TextStream, stop_strings
from tests.fakes import Oracle
from tests.models import live, reference
from tests.tiers import once

PROMPT = "import os\n\n\ndef walk(folder):\n"
NEW = 40
# Hot enough that the embedded model's bytes are seldom whole characters.
HOT = SamplingParams(temperature=3.0, seed=4)
WIDE = "naïve café — 東京 🐍 e\u0301 \N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER} ǆ"


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def long_blocks(engine: Engine, sampling: SamplingParams) -> Engine:
    """The engine with a drafter that knows the text, so that chunks are of several tokens."""
    text = engine.generate(PROMPT, NEW, sampling).token_ids
    return engine.with_drafter(Oracle([*engine.encode(PROMPT), *text], engine.target.vocab_size, deepest=5))


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "sampling"), once(["oracle", "none", "lookahead"], [HOT, SamplingParams()]))
def test_chunks_add_up(tiny_engine: Engine, drafter: str, sampling: SamplingParams) -> None:
    known = drafter == "oracle"
    engine = long_blocks(tiny_engine, sampling) if known else tiny_engine.with_drafter(drafter)
    whole = tiny_engine.generate(PROMPT, NEW, sampling)
    chunks = list(engine.stream(PROMPT, NEW, sampling))
    assert text_of(chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]
    for index, chunk in enumerate(chunks):
        assert chunk.step is not None
        assert (chunk.step.index, chunk.step.tokens) == (index, chunk.token_ids)
    assert (len(chunks) < NEW) == (drafter != "none") or drafter == "lookahead"


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 16])
def test_stop_strings_are_never_shown(tiny_engine: Engine, first: int) -> None:
    sampling = SamplingParams(temperature=1.0, seed=2)
    text = tiny_engine.generate(PROMPT, NEW, sampling).text
    engine = long_blocks(tiny_engine, sampling)
    for at in range(first, len(text) - 12, 32):
        for size in (1, 4, 11):
            stop = text[at : at + size]
            chunks = list(engine.stream(PROMPT, NEW, sampling, stop=stop))
            assert text_of(chunks) == text[: text.index(stop)]
            assert chunks[-1].finish_reason == "stop"


@pytest.mark.slow
def test_text_that_may_begin_a_stop_string_is_held_back(tiny_engine: Engine) -> None:
    """Nothing is shown that a later token would take back, and all of it is shown in the end."""
    assert tiny_engine.tokenizer is not None
    sampling = SamplingParams(temperature=1.0, seed=2)
    text = tiny_engine.generate(PROMPT, NEW, sampling).text
    stop = text[10:16] + "\0"  # begins like the text, and never comes
    shown, tokens, held = "", list[int](), 0
    for chunk in tiny_engine.stream(PROMPT, NEW, sampling, stop=stop):
        shown, tokens = shown + chunk.text, [*tokens, *chunk.token_ids]
        if chunk.finish_reason is None:
            known = tiny_engine.tokenizer.decode(tokens).rstrip("\N{REPLACEMENT CHARACTER}")
            assert stop.startswith(known[len(shown) :])  # no more is held back than may begin it
            assert not any(stop.startswith(known[at:]) for at in range(len(shown)))  # and no less
            held += len(shown) < len(known)
    assert held
    assert shown == text


def test_early_close(tiny_engine: Engine) -> None:
    model = live(tiny_engine.target)
    implementation = model.config._attn_implementation
    stream = tiny_engine.with_drafter("prompt_lookup").stream(PROMPT, NEW)
    first = next(stream)
    assert first.finish_reason is None
    stream.close()  # type: ignore[attr-defined]
    assert list(stream) == []
    assert model.config._attn_implementation == implementation


@pytest.mark.slow
def test_model_is_usable_between_chunks(tiny_engine: Engine) -> None:
    """Its own ``generate``, and another stream over the same target, do not disturb a stream."""
    model, prompt = live(tiny_engine.target), tiny_engine.encode(PROMPT)
    plain = tiny_engine.generate(PROMPT, NEW)
    one = tiny_engine.with_drafter("lookahead").stream(PROMPT, NEW)
    other = tiny_engine.with_drafter("prompt_lookup").stream(PROMPT, NEW, SamplingParams(temperature=1.0, seed=1))
    texts = ["", ""]
    for number, pair in enumerate(zip(one, other, strict=False)):
        texts = [text + chunk.text for text, chunk in zip(texts, pair, strict=True)]
        if number == 1:
            assert reference(model, prompt, 3) == plain.token_ids[:3]
        if number == 5:
            break
    texts = [text + text_of(list(stream)) for text, stream in zip(texts, (one, other), strict=True)]
    assert texts[0] == plain.text
    assert texts[1] == tiny_engine.generate(PROMPT, NEW, SamplingParams(temperature=1.0, seed=1)).text


# -- The text of a growing list of tokens ------------------------------------------------------------------------------


def streamed(engine: Engine, tokens: list[int], stop: list[str] | None = None) -> tuple[list[str], TextStream]:
    stream = TextStream(engine.tokenizer, stop_strings(stop or []))
    pieces = []
    for token in tokens:
        ended = stream.push(token)
        pieces.append(stream.take())
        if ended:
            break
    pieces.append(stream.finish())
    return pieces, stream


@given(data=st.data())
@settings(max_examples=200)
def test_any_tokens_add_up(tiny_engine: Engine, data: st.DataObject) -> None:
    """Bytes in any order: halves of characters, long runs of broken ones, special tokens."""
    assert tiny_engine.tokenizer is not None
    wide = [tiny_engine.tokenizer(character)["input_ids"] for character in WIDE]
    part = (
        st.lists(st.integers(0, 300), max_size=40) | st.lists(st.integers(0, 4095), max_size=8) | st.sampled_from(wide)
    )
    tokens = [token for piece in data.draw(st.lists(part, max_size=12)) for token in piece]
    pieces, stream = streamed(tiny_engine, tokens)
    assert "".join(pieces) == stream.text == tiny_engine.tokenizer.decode(tokens, skip_special_tokens=True)


def test_characters_of_several_tokens_come_whole(tiny_engine: Engine) -> None:
    assert tiny_engine.tokenizer is not None
    text = WIDE * 5
    tokens = tiny_engine.tokenizer(text)["input_ids"]
    assert len(tokens) > len(text), "no character is split over tokens, so this shows nothing"
    pieces, _ = streamed(tiny_engine, tokens)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert any(piece == "" for piece in pieces[:-1])


def test_a_character_after_any_run_of_broken_bytes(tiny_engine: Engine) -> None:
    assert tiny_engine.tokenizer is not None
    snake = tiny_engine.tokenizer("🐍")["input_ids"]
    for broken in range(1, 40):
        tokens = [*snake[-1:] * broken, *snake, *snake]
        pieces, stream = streamed(tiny_engine, tokens)
        assert "".join(pieces) == stream.text == tiny_engine.tokenizer.decode(tokens, skip_special_tokens=True)


def test_stop_strings_of_wide_characters(tiny_engine: Engine) -> None:
    assert tiny_engine.tokenizer is not None
    text = WIDE * 3
    tokens = tiny_engine.tokenizer(text)["input_ids"]
    for stop in ("東", "🐍 e", "é —", "\N{ZERO WIDTH JOINER}", "ǆna"):
        pieces, stream = streamed(tiny_engine, tokens, [stop])
        assert stream.stopped
        assert "".join(pieces) == stream.text == text[: text.index(stop)]


def test_cost_of_a_push_does_not_grow(tiny_engine: Engine) -> None:
    """The tail that is decoded again stays short."""

    class Counting:
        longest = 0

        def decode(self, tokens: list[int], **options: bool) -> str:
            self.longest = max(self.longest, len(tokens))
            assert tiny_engine.tokenizer is not None
            text: str = tiny_engine.tokenizer.decode(tokens, **options)
            return text

    counting = Counting()
    stream = TextStream(counting)
    for token in random.Random(0).choices(range(300, 4096), k=400):
        stream.push(token)
        stream.take()
    stream.finish()
    assert counting.longest < 40
