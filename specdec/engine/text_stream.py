"""Tokens to text as they come: whole characters only, and stop strings found at the token that completes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

__all__ = ["TextStream", "stop_strings"]


def stop_strings(stop: str | Collection[str]) -> list[str]:
    """The stop strings as a list."""
    return [stop] if isinstance(stop, str) else list(stop)


class TextStream:
    """Decodes a growing list of new tokens.

    A token's text can depend on the tokens just before it, so a short tail is decoded again with every push, and text
    is final once it ends in a whole character. The cost of a push does not grow with the text.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._start = 0  # of the tail that is decoded again
        self._known = ""  # final text of the tail's tokens that were final before
        self._final = ""  # final text in all
        self._out = 0  # characters given out
        self.stopped = False

    def push(self, token: int) -> bool:
        """Add a token; True where it completes a stop string."""
        self._tokens.append(token)
        tail = self._decode(self._tokens[self._start :])
        whole = tail.rstrip("\N{REPLACEMENT CHARACTER}")  # broken bytes at the end may become a character yet
        shown = self._final + tail[len(self._known) :]
        if self._stop and not self.stopped:
            # Only a match that ends in new text is new.
            reach = max(map(len, self._stop))
            begin = max(0, len(self._final) - reach)
            hits = [at for text in self._stop if (at := shown.find(text, begin)) >= 0]
            if hits:
                self._final, self.stopped = shown[: min(hits)], True
                return True
        if len(whole) > len(self._known):
            self._final += whole[len(self._known) :]
            self._known = whole
        if len(whole) == len(tail) and len(self._tokens) - self._start > 6:
            self._start = len(self._tokens) - 3
            self._known = self._decode(self._tokens[self._start :])
        return False

    def take(self) -> str:
        """Final text not given out yet, holding back what may turn out to begin a stop string."""
        end = len(self._final)
        if not self.stopped:
            begun = (text[:size] for text in self._stop for size in range(1, len(text)))
            end -= max((len(start) for start in begun if self._final.endswith(start)), default=0)
        text, self._out = self._final[self._out : end], max(self._out, end)
        return text

    def finish(self) -> str:
        """The rest: also characters that never became whole."""
        if not self.stopped:
            tail = self._decode(self._tokens[self._start :])
            self._final += tail[len(self._known) :]
            self._known, self._stop = tail, ()
        return self.take()

    @property
    def text(self) -> str:
        """All final text."""
        return self._final

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
