"""An answer's text as pieces of a message: thinking, content, and tool calls, forced or marked by the model itself."""

from __future__ import annotations

from typing import Any

from specdec.serve.call_reading import Arguments, Reading
from specdec.serve.call_styles import Hermes, JsonCalls, Style, Types
from specdec.serve.thinking import Split, Thinking

__all__ = ["CallReader", "Delta", "MessageReader"]

Delta = dict[str, Any]
"""A piece of an assistant's message, with the key ``reasoning_content``, ``content`` or ``tool_calls``."""


class CallReader:
    """Turns the pieces of an answer's text into pieces of a message.

    Args:
        forced: the function's name where the whole text is its arguments; ``""`` where the whole text is a call with
            its name; None where the model marks calls in its text.
        marked: whether the reader looks for marked calls; where it does not, the text is all content.
        style: how the model marks them.
        types: the parameters' schemas, for styles that write values without their types.
        streams: whether arguments are given out as they come; else each call is one piece.

    Attributes:
        count: the number of calls so far.
        broken: whether the text broke off within a call's arguments, which were closed.
    """

    def __init__(
        self,
        forced: str | None = None,
        marked: bool = False,
        style: Style | None = None,
        types: Types | None = None,
        *,
        streams: bool = False,
    ) -> None:
        self._forced, self._looks = forced, marked and forced is None
        self._style, self._types, self._streams = style or Hermes(), types or {}, streams
        self._held = ""
        self._reading: Reading | None = None  # of the text that has come and is not held
        if forced is not None:
            self._reading = Arguments(forced) if forced else JsonCalls()
        self._gap, self._said = "", False  # what stands before its mark, and whether there is content since a call
        self._call: dict[str, Any] | None = None  # what of a call is not given out yet
        self.count, self.broken = 0, False

    def read(self, text: str, last: bool) -> list[Delta]:
        """The message pieces that a further piece of text completes; with ``last``, no text follows it."""
        if self._reading is None and not self._looks:
            return [{"content": text}] if text and self._forced is None else []
        self._held += text
        found: list[Delta] = []
        while self._reading is not None or (self._looks and self._begins(found, last)):
            reading, held, self._held = self._reading, self._held, ""
            assert reading is not None
            for kind, part in reading.read(held, last):
                self._add(found, kind, part)
            if self._streams:
                self._give(found)
            if not reading.done:
                break
            self._said = self._content(found, reading.said if reading.begun else self._gap + reading.said)
            self._held, self._reading, self.broken = reading.rest, None, self.broken or reading.broken
        return found

    def _begins(self, found: list[Delta], last: bool) -> bool:
        """Add the content of the held text, and return whether a call may begin behind it."""
        between = self._style.between
        start, kept = self._style.find(self._held, not self._said)
        cut = start if start >= 0 else len(self._held) - (0 if last else kept)
        text = self._held[:cut] if self.count == 0 or self._said else self._held[:cut].lstrip(between)
        blank = not self._said and not text.strip(between)
        if blank and start < 0 and not last:  # it is left out where a call follows
            return False
        if not (blank and start >= 0):
            self._said |= self._content(found, text)
        self._held = self._held[cut:]
        if start >= 0:
            self._gap, self._reading = text if blank else "", self._style.reading(self._types)
        return start >= 0

    def _content(self, found: list[Delta], text: str) -> bool:
        """Add content, and return whether there is any."""
        if text:
            found.append({"content": text})
        return bool(text)

    def _add(self, found: list[Delta], kind: str, text: str) -> None:
        """Add what becomes of a call."""
        if kind == "begin":
            function = {"name": text, "arguments": ""}
            self._call = {"index": self.count, "id": self._style.new_id(), "type": "function", "function": function}
            self.count += 1
        elif kind == "end":
            self._give(found)
        else:
            if self._call is None:
                self._call = {"index": self.count - 1, "function": {"arguments": ""}}
            self._call["function"]["arguments"] += text

    def _give(self, found: list[Delta]) -> None:
        if self._call is not None:
            found.append({"tool_calls": [self._call]})
            self._call = None


class MessageReader:
    """The same, with what the model thinks before its answer.

    Args:
        thinking: how the answer begins.
        calls: reads the text behind the thinking.
    """

    def __init__(self, thinking: Thinking, calls: CallReader) -> None:
        self._split, self._calls = Split(thinking), calls

    @property
    def count(self) -> int:
        """The number of calls so far."""
        return self._calls.count

    @property
    def called(self) -> bool:
        """Whether there are calls, and all of them are whole."""
        return self._calls.count > 0 and not self._calls.broken

    def read(self, text: str, last: bool) -> list[Delta]:
        """The message pieces that a further piece of text completes; with ``last``, no text follows it."""
        thought, text = self._split.read(text, last)
        found: list[Delta] = [{"reasoning_content": thought}] if thought else []
        if not text and self._split.waits:  # a call that is required has not begun
            return found or ([{"content": ""}] if last else [])
        return found + self._calls.read(text, last)
