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
        eos_ids, stop_token_ids: tokens that end it; ``ends``: both.
        watches: whether other tokens may end it, so that :meth:`cut` has to see each.
    """

    def __init__(self, tokenizer: Any, request: Request, tokens: list[int], most: int) -> None:
        assert request.eos_ids is not None
        assert isinstance(request.stop_token_ids, frozenset)
        self.reason: str | None = None
        self.most, self._tokens, self._read = most, tokens, len(tokens)
        self._last_reason = "length" if most == len(tokens) + request.max_new_tokens else "context"
        self._stop_when, self.eos_ids, self.stop_token_ids = request.stop_when, request.eos_ids, request.stop_token_ids
        self.ends = self.eos_ids | self.stop_token_ids
        self._text = (
            None if tokenizer is None else TextStream(tokenizer, [*request.stop], tokens, min_tokens=request.min_tokens)
        )
        self._stops = self._text is not None and bool(request.stop)
        self.watches = self._stops or self._stop_when is not None

    @property
    def text(self) -> str:
        """The new tokens' text; empty without a tokenizer."""
        return "" if self._text is None else self._whole().text

    def new_text(self) -> str:
        """The text that the tokens since the last call complete; all of it once the text has ended."""
        text = self._whole()
        return text.take() if self.reason is None else text.finish()

    def _whole(self) -> TextStream:
        """The text of all tokens; where it may hold a stop string, ``cut`` has put each there."""
        assert self._text is not None
        if not self._stops:
            self._text.extend(self._tokens[self._read :])
            self._read = len(self._tokens)
        return self._text

    def cut(self, tokens: Sequence[int]) -> int:
        """How many accepted tokens plain decoding would have emitted; sets the reason if the text ends there."""
        for count, token in enumerate(tokens, 1):
            stopped = (self._stops and self._text is not None and self._text.push(token)) or (
                token in self.stop_token_ids
            )
            if token in self.eos_ids:
                self.reason = "eos"
            elif stopped or (self._stop_when is not None and self._stop_when([*self._tokens, *tokens[:count]])):
                self.reason = "stop"
            elif len(self._tokens) + count == self.most:
                self.reason = self._last_reason
            if self.reason is not None:
                return count
        return len(tokens)
