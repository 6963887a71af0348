"""Names of tokens: parts of characters are told apart, words keep their space, offsets point into the text."""

from __future__ import annotations

import pytest

from specdec.engine.text_stream import continuation
from specdec.results import TokenLogprobs
from specdec.serve.logprobs import Offsets, TokenNames
from tests.small_tokenizers import ids_of, tokenizer_of

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXT = "a b \N{SNOWMAN} b\N{LATIN SMALL LETTER U WITH DIAERESIS} a"


@pytest.mark.parametrize("kind", ["byte-level BPE", "byte fallback", "byte fallback, first space kept"])
def test_names_offsets_and_bytes_are_those_of_the_text(kind: str) -> None:
    tokenizer, tokens = tokenizer_of(kind), ids_of(kind, TEXT)
    prompt, tokens = tokens[:1], tokens[1:]
    text = continuation(tokenizer, prompt, tokens)
    names, found = TokenNames(tokenizer), [TokenLogprobs(token, -1.0) for token in tokens]
    told = names.completion(found, Offsets(names, tokenizer, prompt).of(tokens))
    assert any(name.startswith("bytes:\\x") for name in told["tokens"]), "a part of a character"
    assert any(name.startswith(" ") for name in told["tokens"]), "a word with its space"
    for name, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert offset < len(text)
        assert name.startswith("bytes:") or text[offset:].startswith(name)
    assert told["text_offset"] == sorted(told["text_offset"])
    chat = names.chat(found)["content"]
    assert b"".join(bytes(one["bytes"]) for one in chat).decode() == text


def test_all_top_tokens_are_listed_and_the_drawn_one_with_them() -> None:
    tokenizer = tokenizer_of("byte-level BPE")
    parts = [token for token in set(ids_of("byte-level BPE", TEXT)) if BROKEN in tokenizer.decode([token])]
    assert len(parts) > 2
    drawn, *others = parts
    one = TokenLogprobs(drawn, -9.0, tuple((token, -1.0 * token) for token in others))
    (top,) = TokenNames(tokenizer).completion([one], [0])["top_logprobs"]
    assert len(top) == len(parts)
    assert list(top.values()) == sorted(top.values(), reverse=True)
    (top,) = TokenNames(tokenizer).completion([TokenLogprobs(drawn, float("-inf"))], [0])["top_logprobs"]
    assert list(top.values()) == [-9999.0]
