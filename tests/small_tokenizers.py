"""Tokenizers of every kind that text is decoded by, each of some hundred tokens or fewer, built here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ("<|x|>", "<|end|>")


def _fast(raw: Tokenizer, **options: Any) -> Any:
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=SPECIAL[1], **options)


def _byte_fallback(*, strips: bool) -> Any:
    """As Llama 2's, or, where a text's first space is kept, as Gemma's."""
    pieces = ["<unk>", *BYTES, SPACE, *"abcdef'", *(SPACE + letter for letter in "abc"), SPACE * 2, "é"]
    merges = [(SPACE, letter) for letter in "abc"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", SPACE)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces] if strips else [spaces])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    raw.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return _fast(raw, unk_token="<unk>")


def _byte_level() -> Any:
    """As GPT-2's; some tokens are halves of characters."""
    pieces = [*sorted(bytes_to_unicode().values()), "ab", "Ġa", "ðŁ"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    raw = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("Ġ", "a"), ("ð", "Ł")]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _fast(raw)


def _unigram(*, cleans: bool) -> Any:
    """As T5's or XLNet's."""
    words = [*"xnrvtem'.!", "n't", *(SPACE + word for word in ("", "x", "do", "n't", "'", ".", "n", "v", SPACE, "'m"))]
    raw = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -3.0) for word in words)], unk_id=0))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _fast(raw, unk_token="<unk>", clean_up_tokenization_spaces=cleans)


def _word_piece(*, cleans: bool) -> Any:
    """As BERT's, which language models of Chinese and Japanese have, too."""
    pieces = ["[UNK]", "do", "##n", "n", "'", "t", "##t", ".", "!", "##ing", "v", "ve", "##ve", "a", "東", "##京"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=not cleans)
    return _fast(raw, unk_token="[UNK]", clean_up_tokenization_spaces=cleans)


_KINDS: dict[str, Callable[[], Any]] = {
    "byte fallback": functools.partial(_byte_fallback, strips=True),
    "byte fallback, first space kept": functools.partial(_byte_fallback, strips=False),
    "byte-level BPE": _byte_level,
    "unigram": functools.partial(_unigram, cleans=False),
    "unigram, cleaned up": functools.partial(_unigram, cleans=True),
    "word pieces": functools.partial(_word_piece, cleans=False),
    "word pieces, cleaned up": functools.partial(_word_piece, cleans=True),
}
KINDS = tuple(_KINDS)


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """The tokenizer of that kind; one for all tests."""
    return _KINDS[kind]()


def ids_of(kind: str, text: str) -> list[int]:
    """Its tokens of a text, special ones where the text spells them."""
    return list(tokenizer_of(kind)(text, add_special_tokens=False)["input_ids"])
