"""Log-probabilities as OpenAI's JSON: names of tokens, their bytes, and where each stands in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from specdec.engine.text_stream import TextStream, continuation
from specdec.results import TokenLogprobs

__all__ = ["Offsets", "TokenNames"]

Json = dict[str, Any]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # SentencePiece's tokens of single bytes
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class TokenNames:
    """Names of tokens.

    A token's text is what it adds behind a letter, so that SentencePiece's words keep their space. A part of a
    character has no text: in completions its name is its bytes, such as ``bytes:\\xc3``, as OpenAI writes it, so that
    parts are told apart.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(1 << 14)(self._text)

    def chat(self, found: Sequence[TokenLogprobs]) -> Json:
        """A chat's ``logprobs``."""
        return {"content": [self._with_top(one) for one in found]}

    def completion(self, found: Sequence[TokenLogprobs], offsets: Sequence[int]) -> Json:
        """A completion's ``logprobs``; the drawn token is always among its top ones."""
        tops = [[*one.top, (one.token_id, one.logprob)] for one in found]
        return {
            "tokens": [self._key(one.token_id) for one in found],
            "token_logprobs": [_finite(one.logprob) for one in found],
            "top_logprobs": [
                {self._key(token): _finite(value) for token, value in sorted(top, key=lambda pair: pair[1])[::-1]}
                for top in tops
            ],
            "text_offset": list(offsets),
        }

    def _with_top(self, one: TokenLogprobs) -> Json:
        return {**self._named(one.token_id, one.logprob), "top_logprobs": [self._named(*pair) for pair in one.top]}

    def _named(self, token: int, value: float) -> Json:
        return {"token": self.text(token), "logprob": _finite(value), "bytes": self._bytes(token)}

    def _key(self, token: int) -> str:
        text = self.text(token)
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes(token)) if _BROKEN in text else text

    def _text(self, token: int) -> str:
        anchor = self._anchor
        return (
            self._tokenizer.decode([token])
            if anchor is None
            else continuation(self._tokenizer, [anchor], [token], skip_special_tokens=False)
        )

    @cached_property
    def _anchor(self) -> int | None:
        """A letter's token; None where the tokenizer has none."""
        ids = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        return ids[-1] if ids else None

    def _bytes(self, token: int) -> list[int]:
        """The bytes of a token; a token can hold a part of a character's bytes."""
        piece, text = self._tokenizer.convert_ids_to_tokens(token), self.text(token)
        if _BROKEN in text and piece:
            if byte := _BYTE.fullmatch(piece):
                return [int(byte[1], 16)]
            if all(character in _BYTES for character in piece):
                return [_BYTES[character] for character in piece]
        return list(text.encode())


class Offsets:
    """Where each token of a text begins, in characters; a part of a character begins where its run of parts does.

    Args:
        names: names of tokens.
        tokenizer: decodes the tokens.
        prompt: the tokens before the text.
    """

    def __init__(self, names: TokenNames, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._names, self._stream, self._length = names, TextStream(tokenizer, prompt=prompt), 0

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the text's next tokens."""
        found = []
        for token in tokens:
            self._stream.extend([token])
            name, new = self._names.text(token), self._stream.take()
            known = name and _BROKEN not in name and new.endswith(name)  # parts before it are known with it only
            found.append(self._length + (len(new) - len(name) if known else 0))
            self._length += len(new)
        return found


def _finite(logprob: float) -> float:
    """The log-probability, or OpenAI's -9999 in place of minus infinity, for which JSON has no number."""
    return max(logprob, -9999.0)
