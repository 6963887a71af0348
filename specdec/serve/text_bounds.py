"""What the length of a text says of its tokens, before it is tokenized: that it cannot fit into so many of them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

__all__ = ["TokenBytes", "bytes_of_a_token", "least_tokens"]

# A normalizer of these makes no text shorter than a quarter: composed characters, or one byte for a letter of four.
_KEEPING = ("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Lowercase", "ByteLevel")
_SHRINKS = 4
_SPLITTING = {"Sequence", "ByteLevel", "Split", "Digits", "Punctuation", "Metaspace"}  # these keep whitespace


class TokenBytes(NamedTuple):
    """What one token stands for.

    Attributes:
        most: bytes of a text, at most.
        spaces: whether this holds of whitespace, too; else a token may take any amount of it.
    """

    most: int
    spaces: bool


def bytes_of_a_token(tokenizer: Any) -> TokenBytes | None:
    """What one token stands for at most; None where no number is known to bound it.

    It is known of vocabularies that have all bytes: others have a token for whatever they do not know, of any length.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    described = json.loads(backend.to_str())
    model, vocabulary = described["model"], backend.get_vocab(with_added_tokens=True)
    byte_level = "ByteLevel" in _kinds(described["pre_tokenizer"]) | _kinds(described["normalizer"])
    if not (model.get("type") == "BPE" and byte_level) and not model.get("byte_fallback"):
        return None
    normalizers = _kinds(described["normalizer"])
    steps = [described["normalizer"], described["pre_tokenizer"]]
    if not normalizers <= {"Sequence", *_KEEPING} or _removes(steps):
        return None
    longest = max(len(piece if byte_level else piece.encode()) for piece in vocabulary)
    strips = any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"])
    spaces = not strips and _kinds(described["pre_tokenizer"]) <= _SPLITTING
    return TokenBytes(longest * (_SHRINKS if normalizers - {"Sequence", "Prepend", "ByteLevel"} else 1), spaces)


def least_tokens(text: str, token: TokenBytes | None) -> int:
    """A number of tokens that a text has at least, by its characters."""
    if token is None or len(text) <= token.most:
        return 0
    return (len(text) - (0 if token.spaces else sum(map(text.count, _SPACES)))) // token.most


def _kinds(step: Any) -> set[str]:
    """The types of a step of a tokenizer, and of the steps in it."""
    if isinstance(step, dict):
        return {step["type"]} | _kinds([*step.values()]) if "type" in step else _kinds([*step.values()])
    return set[str]().union(*map(_kinds, step)) if isinstance(step, list) else set()


def _removes(step: Any) -> bool:
    """Whether a step of a tokenizer may leave out, or shorten, what is no whitespace."""
    if isinstance(step, list):
        return any(map(_removes, step))
    if not isinstance(step, dict):
        return False
    if step.get("type") == "Replace" and (len(step["pattern"].get("String", "")) != 1 or not step["content"]):
        return True
    return step.get("behavior") == "Removed" or any(map(_removes, step.values()))


_SPACES = [chr(code) for code in range(0x3001) if chr(code).isspace()]
