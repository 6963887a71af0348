"""Marks: texts that begin and end parts of an answer, which a vocabulary may have as special tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

__all__ = ["beginning", "hidden_tokens", "special_tokens"]


def beginning(text: str, mark: str) -> int:
    """The number of characters at the text's end that may begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


@lru_cache(8)
def hidden_tokens(tokenizer: Any, marks: tuple[str, ...]) -> frozenset[int] | None:
    """The special tokens that are left out of a text whose marks are read; None where no mark is a special token."""
    special = _special(tokenizer)
    if not any(text in marks for text in special.values()):
        return None
    return frozenset(token for token, text in special.items() if text not in marks)


@lru_cache(8)
def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The special tokens."""
    return frozenset(_special(tokenizer))


def _special(tokenizer: Any) -> dict[int, str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token: str(one) for token, one in added.items() if one.special}
