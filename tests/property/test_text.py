"""Text from tokens: whatever they are, streams, generations and ``decode`` agree, and what it shows is what stops."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import Draft, Engine
from specdec.engine.text_stream import TextStream, as_content, continuation
from tests.fakes import Reciter, Scripted
from tests.small_tokenizers import KINDS, SPECIAL, ids_of, tokenizer_of

WIDE = ("\U0001f600", "é", "東京", "\U0001f680\U0001f389", "a b", " b", "do n't .", "x ' x", SPECIAL[0])
EXAMPLES = [pytest.param(30, id="quick"), pytest.param(1500, marks=pytest.mark.slow, id="deep")]


def token_lists(kind: str, longest: int) -> st.SearchStrategy[list[int]]:
    """Tokens in any order: whole characters, halves of some, long runs of bytes, special tokens among them."""
    size = len(tokenizer_of(kind))
    wide = st.sampled_from([ids_of(kind, text) for text in WIDE])
    halves = wide.flatmap(lambda ids: st.integers(0, len(ids)).map(lambda cut: ids[cut:]))
    marks = st.sampled_from([ids_of(kind, token) for token in SPECIAL])
    loose = st.lists(st.integers(0, size - 1), max_size=6)
    runs = st.integers(0, size - 1).flatmap(lambda token: st.integers(1, 30).map(lambda count: [token] * count))
    parts = st.lists(wide | halves | marks | loose | runs, max_size=longest)
    return parts.map(lambda found: [token for part in found for token in part])


def decoded(kind: str, prompt: Sequence[int], tokens: Sequence[int], *, skip: bool = True) -> str:
    """What the tokens add to the prompt's text, or, where they change its end, what follows all that they leave."""
    decode = tokenizer_of(kind).decode
    before = decode([*prompt], skip_special_tokens=skip)
    text: str = decode([*prompt, *tokens], skip_special_tokens=skip)
    batch_invariant = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))))
    return text[len(before) if text.startswith(before) else batch_invariant :]


class Drawn:
    """A prompt, tokens behind it, and the numbers of tokens that come at once."""

    def __init__(self, data: st.DataObject) -> None:
        self.kind = data.draw(st.sampled_from(KINDS))
        self.prompt = data.draw(token_lists(self.kind, 4))
        self.tokens = data.draw(token_lists(self.kind, 8))
        self.sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))

    def is_seen(self, count: int) -> bool:
        """Whether the test calls ``take`` after ``count`` tokens."""
        return count % self.sizes[count % len(self.sizes)] == 0


@pytest.mark.parametrize("examples", EXAMPLES)
def test_streams_and_decode_agree(examples: int) -> None:
    @given(data=st.data())
    @settings(max_examples=examples)
    def check(data: st.DataObject) -> None:
        case = Drawn(data)
        for skip in (True, False):
            expected = decoded(case.kind, case.prompt, case.tokens, skip=skip)
            tokenizer = tokenizer_of(case.kind)
            assert continuation(tokenizer, case.prompt, case.tokens, skip_special_tokens=skip) == expected
            stream = TextStream(tokenizer, prompt=case.prompt, skip_special_tokens=skip)
            parts = []
            for count, token in enumerate(case.tokens, 1):
                stream.push(token)
                if case.is_seen(count):
                    parts.append(stream.take())
                    assert expected.startswith("".join(parts))
            assert "".join([*parts, stream.finish()]) == stream.text == expected

    check()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_what_decode_shows_stops(examples: int) -> None:
    """At the token that completes it, however the text is taken, and nothing else does."""

    @given(data=st.data())
    @settings(max_examples=examples)
    def check(data: st.DataObject) -> None:
        case = Drawn(data)
        views = [decoded(case.kind, case.prompt, case.tokens, skip=skip) for skip in (True, False)]
        source = data.draw(st.sampled_from(views)) or "?"
        begin = data.draw(st.integers(0, len(source) - 1))
        stops = [source[begin : begin + data.draw(st.integers(1, 9))], *data.draw(st.lists(st.just("\0a"), max_size=1))]
        tokenizer = tokenizer_of(case.kind)
        whole, stream = TextStream(tokenizer, stops, case.prompt), TextStream(tokenizer, stops, case.prompt)
        parts = []
        for count, token in enumerate(case.tokens, 1):
            shown, marked = (decoded(case.kind, case.prompt, case.tokens[:count], skip=skip) for skip in (True, False))
            expected = any(stop in shown or stop in marked for stop in stops)
            assert (whole.push(token), stream.push(token)) == (expected, expected)
            if case.is_seen(count):
                parts.append(stream.take())
            if expected:
                assert shown.startswith(whole.text)
                if stops[0] in shown:
                    assert len(whole.text) <= shown.index(stops[0])
                break
        assert "".join([*parts, stream.finish()]) == stream.text == whole.text
        assert whole.stopped or whole.text == views[0]

    check()


@pytest.mark.parametrize("between", ["", "<|x|>"])
@pytest.mark.parametrize(
    ("first", "text"), [("è", "\N{REPLACEMENT CHARACTER}" * 3 + "a"), ("", "\N{REPLACEMENT CHARACTER}a")]
)
def test_a_run_of_bytes_is_text_only_as_a_whole(first: str, between: str, text: str) -> None:
    """A broken byte takes with it the characters of the run; a special token that is not shown does not end it."""
    kind = "byte fallback, first space kept"
    tokens = [*ids_of(kind, first + between), *tokenizer_of(kind).convert_tokens_to_ids(["<0xFF>", "a"])]
    stream = TextStream(tokenizer_of(kind))
    parts = [stream.take() for token in tokens if not stream.push(token)]
    assert parts == [""] * (len(tokens) - 1) + [text]
    assert stream.text == decoded(kind, [], tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_stops_and_is_not_shown(kind: str) -> None:
    """By itself, with text before it, behind it, or around it."""
    said = "x do" if "unigram" in kind else "do n" if "word" in kind else "a é"
    before, behind = ids_of(kind, said), ids_of(kind, "do" if "word" in kind else "x")
    tokens = [*before, *ids_of(kind, "<|x|>"), *behind]
    marked, shown = decoded(kind, [], tokens, skip=False), decoded(kind, [], before)
    place = marked.index("<|x|>")
    for begin in range(place + 1):
        for end in range(place + len("<|x|>"), len(marked) + 1):
            stop = marked[begin:end]
            stream, taken, count = TextStream(tokenizer_of(kind), [stop]), "", 0
            while not stream.stopped:
                stream.push(tokens[count])
                taken, count = taken + stream.take(), count + 1
            assert stop in decoded(kind, [], tokens[:count], skip=False)
            assert stop not in decoded(kind, [], tokens[: count - 1], skip=False)
            assert taken == stream.text == shown[:begin], stop


# -- In an engine ------------------------------------------------------------------------------------------------------


def reciting(kind: str, prompt: list[int], tokens: list[int], block: int) -> Engine:
    """An engine whose target generates ``tokens``; its drafter proposes ``block`` of them in a step."""
    script = [*prompt, *tokens, 0, 0]
    target = Reciter(lambda text: script[min(len(text), len(script) - 1)], vocab_size=len(tokenizer_of(kind)))

    def draft(context: object, row_budget: int) -> Draft:
        known = len(drafter.context.tokens)
        return Draft.chain(script[known - 1 : known - 1 + max(1, min(block, row_budget))])

    drafter = Scripted(draft)
    return Engine(target, tokenizer_of(kind), drafter)


@pytest.mark.few(2)
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_decode_has_the_same_text(kind: str, block: int) -> None:
    prompt = ids_of(kind, "a b") or [1]
    tokens = ids_of(kind, "do n't x \U0001f600\U0001f680 a b<|x|> é \U0001f389")
    engine, count = reciting(kind, prompt, tokens, block), len(tokens)
    expected = decoded(kind, prompt, tokens)
    assert engine.generate(prompt, count).text == expected
    assert engine.generate(prompt, count, stop="\0").text == expected
    assert "".join(chunk.text for chunk in engine.stream(prompt, count)) == expected
    assert [one.text for one in engine.generate_batch([prompt] * 2, count)] == [expected] * 2
    texts = ["", ""]
    for place, chunk in engine.stream_batch([prompt] * 2, count, stop=["\0"]):
        texts[place] += chunk.text
    assert texts == [expected] * 2
    if expected:
        stopped = engine.generate(prompt, count, stop="<|x|>")
        assert (stopped.finish_reason, stopped.token_ids) == ("stop", tokens[: len(stopped.token_ids)])
        assert stopped.token_ids[-1] == ids_of(kind, "<|x|>")[0]
        assert stopped.text == decoded(kind, prompt, stopped.token_ids)


def test_the_space_that_joins_is_kept_and_is_no_part_of_a_message() -> None:
    """SentencePiece's words begin with it; where the text begins, it is not shown."""
    kind = "byte fallback"
    prompt, tokens = ids_of(kind, "a"), ids_of(kind, "b c")
    text = reciting(kind, prompt, tokens, 4).generate(prompt, len(tokens)).text
    assert text == " b c"
    assert continuation(tokenizer_of(kind), [], tokens) == "b c"
    assert as_content(text, tokenizer_of(kind), tokens) == "b c"
    level = "byte-level BPE"
    tokens = ids_of(level, " b c")
    assert as_content(" b c", tokenizer_of(level), tokens) == " b c"  # a space that the model wrote
