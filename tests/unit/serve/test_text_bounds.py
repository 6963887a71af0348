"""What the length of a text says of its tokens is never more than they are."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.serve.text_bounds import bytes_of_a_token, least_tokens

WORDS = [
    "a",
    "ab",
    "abc",
    "é",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{HANGUL SYLLABLE GAG}",
    " ",
    "\n\n",
    "<|x|>",
    "𝐀",
    "!",
]


def byte_level(strips: bool = True, **more: Any) -> PreTrainedTokenizerFast:
    """A vocabulary of all bytes, two merges and a token that may take the whitespace around it."""
    alphabet = {piece: place for place, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary = {**alphabet, "ab": 256, "abc": 257}
    inner = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|x|>", lstrip=strips, rstrip=strips)])
    for name, value in more.items():
        setattr(inner, name, value)
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC(), normalizers.Replace(" ", "_")])
def test_texts_have_at_least_so_many_tokens(normalizer: Any, strips: bool) -> None:
    tokenizer = byte_level(strips, **({} if normalizer is None else {"normalizer": normalizer}))
    most = 5 * (1 if normalizer is None else 4)  # <|x|> is the longest
    token = bytes_of_a_token(tokenizer)
    assert token == (most, not strips)
    dice = random.Random(0)
    for size in (3, 30, 300):
        for _ in range(20):
            text = "".join(dice.choices(WORDS, k=size))
            count = len(tokenizer(text)["input_ids"])
            assert least_tokens(text, token) <= count, text
    assert least_tokens("!" * 1000, token) == 1000 // most
    assert least_tokens(" " * 1000, token) == (0 if strips else 1000 // most), "a token may take all of it"


@pytest.mark.parametrize("splitter", [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Whitespace()])
def test_whitespace_that_is_left_out_does_not_count(splitter: Any) -> None:
    steps = pre_tokenizers.Sequence([splitter, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer = byte_level(False, pre_tokenizer=steps)
    assert len(tokenizer(" " * 1000)["input_ids"]) == least_tokens(" " * 1000, bytes_of_a_token(tokenizer)) == 0


def test_no_bound_is_claimed_where_a_token_may_stand_for_anything() -> None:
    unknown = Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    assert bytes_of_a_token(PreTrainedTokenizerFast(tokenizer_object=unknown)) is None
    for step in (
        {"normalizer": normalizers.Replace("abc", "")},
        {"normalizer": normalizers.BertNormalizer()},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Punctuation("removed"), pre_tokenizers.ByteLevel()])},
    ):
        assert bytes_of_a_token(byte_level(**step)) is None
    assert bytes_of_a_token(object()) is None
    assert least_tokens("x" * 1000, None) == 0


def test_bytes_that_are_fallen_back_on() -> None:
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\N{LOWER ONE EIGHTH BLOCK}a": 256}
    inner = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    assert bytes_of_a_token(PreTrainedTokenizerFast(tokenizer_object=inner)) is not None
