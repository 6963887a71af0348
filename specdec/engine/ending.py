"""The end of a text: where plain decoding would have ended it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.engine.requests import Request
from specdec.engine.text_stream import TextStream

__all__ = ["Ending"]


class Ending:
    """Decides after which token a text ends, and makes its text.

    Args:
        tokenizer: transformers' tokenizer, or None.
        request: a prepared request.
        tokens: prompt and text, which grows.
        most: most tokens of the text, prompt and all.

    Attributes:
        reason: why the text ended; None while it goes on.
        eos_ids, stop_token_ids: tokens that end it.
    """

    def __init__(self, tokenizer: Any, request: Request, tokens: list[int], most: int) -> None:
        assert request.eos_ids is not None
        assert isinstance(request.stop_token_ids, frozenset)
        self.reason: str | None = None
        self.most, self._tokens = most, tokens
        self._last_reason = "length" if most == len(tokens) + request.max_new_tokens else "context"
        self._stop_when, self.eos_ids, self.stop_token_ids = request.stop_when, request.eos_ids, request.stop_token_ids
        self._ends = self.eos_ids | self.stop_token_ids
        self._text = (
            None if tokenizer is None else TextStream(tokenizer, [*request.stop], tokens, min_tokens=request.min_tokens)
        )

    @property
    def text(self) -> str:
        """The new tokens' text; empty without a tokenizer."""
        return "" if self._text is None else self._text.text

    def new_text(self) -> str:
        """The text that the tokens since the last call complete; all of it once the text has ended."""
        assert self._text is not None
        return self._text.take() if self.reason is None else self._text.finish()

    def cut(self, tokens: Sequence[int]) -> int:
        """How many accepted tokens plain decoding would have emitted; sets the reason if the text ends there."""
        text = self._text
        watched = self._stop_when is not None or (text is not None and text.watches)
        if not watched and self._ends.isdisjoint(tokens) and len(self._tokens) + len(tokens) < self.most:
            if text is not None:
                text.extend(tokens)
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            stopped = (text is not None and text.push(token)) or token in self.stop_token_ids
            if token in self.eos_ids:
                self.reason = "eos"
            elif stopped or (self._stop_when is not None and self._stop_when([*self._tokens, *tokens[:count]])):
                self.reason = "stop"
            elif len(self._tokens) + count == self.most:
                self.reason = self._last_reason
            if self.reason is not None:
                return count
        return len(tokens)
