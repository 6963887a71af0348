"""An answer's text as pieces of a message: thinking, content, and tool calls, forced or marked by the model itself."""

from __future__ import annotations

from typing import Any

from specdec.serve.call_styles import Call, Hermes, Reading, Style, Types, json_calls
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
    """

    def __init__(
        self,
        forced: str | None = None,
        marked: bool = False,
        style: Style | None = None,
        types: Types | None = None,
    ) -> None:
        self._forced, self._marked, self._style, self._types = forced, marked, style or Hermes(), types or {}
        self._held = ""
        self._call: Reading | None = None  # of the call that the held text begins with
        self._gap, self._said = "", False  # what stands before that call, and whether there is content since the latest
        self.count = 0

    def read(self, text: str, last: bool) -> list[Delta]:
        """The message pieces that a further piece of text completes; with ``last``, no text follows it."""
        if self._forced is None and not self._marked:
            return [{"content": text}] if text else []
        if self._forced:
            return self._arguments(text)
        self._held += text
        if self._forced is not None:
            return self._whole() if last else []
        return self._found(last)

    def _arguments(self, text: str) -> list[Delta]:
        """The text as further arguments of the one forced call."""
        if self.count:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}] if text else []
        self.count = 1
        return [{"tool_calls": [self._numbered_call(0, str(self._forced), text)]}]

    def _whole(self) -> list[Delta]:
        """The whole text as a call, or as content where the text ended before the call did."""
        calls = json_calls(self._held)
        return self._numbered(calls) if calls else [{"content": self._held}]

    def _found(self, last: bool) -> list[Delta]:
        """The content and the calls that the held text holds in full."""
        found: list[Delta] = []
        between = self._style.between
        while True:
            if self._call is None:
                start, kept = self._style.find(self._held, not self._said)
                cut = start if start >= 0 else len(self._held) - (0 if last else kept)
                text = self._held[:cut] if self.count == 0 or self._said else self._held[:cut].lstrip(between)
                blank = not self._said and not text.strip(between)
                if blank and start < 0 and not last:  # it is left out where a call follows
                    return found
                if text and not (blank and start >= 0):
                    found.append({"content": text})
                    self._said = True
                self._held = self._held[cut:]
                if start < 0:
                    return found
                self._gap, self._call = text if blank else "", self._style.reading(self._types)
            end = self._call.end(self._held, last)
            if end is None:
                return found
            found += self._ended(*end)

    def _ended(self, calls: list[Call], stop: int) -> list[Delta]:
        """The pieces of a marked text that ends at ``stop`` of the held text: calls, or content where it is none."""
        text = self._gap + self._held[:stop]
        self._held, self._call, self._said = self._held[stop:], None, not calls
        return self._numbered(calls) if calls else [{"content": text}]

    def _numbered(self, calls: list[Call]) -> list[Delta]:
        first, self.count = self.count, self.count + len(calls)
        return [{"tool_calls": [self._numbered_call(first + place, *call)]} for place, call in enumerate(calls)]

    def _numbered_call(self, index: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"index": index, "id": self._style.new_id(), "type": "function", "function": function}


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

    def read(self, text: str, last: bool) -> list[Delta]:
        """The message pieces that a further piece of text completes; with ``last``, no text follows it."""
        thought, text = self._split.read(text, last)
        found: list[Delta] = [{"reasoning_content": thought}] if thought else []
        if not text and self._split.waits:  # a call that is required has not begun
            return found or ([{"content": ""}] if last else [])
        return found + self._calls.read(text, last)
