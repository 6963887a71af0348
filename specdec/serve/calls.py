"""Tool calls in an answer's text: forced calls, which are the whole text, and calls that the model itself marks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from secrets import token_hex
from typing import Any

__all__ = ["MARKS", "CallReader", "Delta"]

MARKS = "<tool_call>", "</tool_call>"
"""The marks around a call in the format of Hermes, Qwen and SmolLM, which chat templates ask for."""

Delta = dict[str, Any]
"""A piece of an assistant's message, with the key ``content`` or ``tool_calls``."""


class CallReader:
    """Turns the pieces of an answer's text into pieces of a message.

    Args:
        forced: the function's name where the whole text is its arguments; ``""`` where the whole text is a call with
            its name; None where the model marks calls in its text.
        marked: whether the reader looks for marked calls; where it does not, the text is all content.
    """

    def __init__(self, forced: str | None = None, marked: bool = False) -> None:
        self._forced, self._marked = forced, marked
        self._held = ""
        self._call: _Marked | None = None  # the call that the held text begins with
        self._gap, self._said = "", False  # whitespace before that call, and whether there is content since the latest
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
        return [{"tool_calls": [_call(0, str(self._forced), text)]}]

    def _whole(self) -> list[Delta]:
        """The whole text as a call, or as content where the text ended before the call did."""
        calls = _calls(self._held)
        return self._numbered(calls) if calls else [{"content": self._held}]

    def _found(self, last: bool) -> list[Delta]:
        """The content and the calls that the held text holds in full."""
        found: list[Delta] = []
        begin, _ = MARKS
        while True:
            if self._call is None:
                start = self._held.find(begin)
                keep = 0 if last else _beginning(self._held, begin)
                cut = start if start >= 0 else len(self._held) - keep
                text = self._held[:cut] if self.count == 0 or self._said else self._held[:cut].lstrip()
                blank = not self._said and not text.strip()
                if blank and start < 0 and not last:  # it is left out where a call follows
                    return found
                if text and not (blank and start >= 0):
                    found.append({"content": text})
                    self._said = True
                self._held = self._held[cut:]
                if start < 0:
                    return found
                self._gap, self._call = text if blank else "", _Marked()
            end = self._call.end(self._held, last)
            if end is None:
                return found
            found += self._ended(*end)

    def _ended(self, inside: str, stop: int) -> list[Delta]:
        """The pieces of a marked text that ends at ``stop`` of the held text: calls, or content where it is none."""
        calls, text = _calls(inside), self._gap + self._held[:stop]
        self._held, self._call, self._said = self._held[stop:], None, not calls
        return self._numbered(calls) if calls else [{"content": text}]

    def _numbered(self, calls: list[tuple[str, str]]) -> list[Delta]:
        first, self.count = self.count, self.count + len(calls)
        return [{"tool_calls": [_call(first + place, *call)]} for place, call in enumerate(calls)]


class _Marked:
    """Looks for the end of a marked call: a mark that is in no text of its JSON. Each character is looked at once."""

    def __init__(self) -> None:
        self._at, self._quoted = len(MARKS[0]), False

    def end(self, held: str, last: bool) -> tuple[str, int] | None:
        """What stands between the marks, and where the closing one ends; None where more of the text is needed."""
        begin, close = MARKS
        while found := _STOPS[self._quoted].search(held, self._at):
            if found[0] == close:
                return held[len(begin) : found.start()], found.end()
            if found[0] == "\\":
                if found.end() == len(held):  # the escaped character is still to come
                    break
                self._at = found.end() + 1
            else:
                self._quoted, self._at = not self._quoted, found.end()
        else:
            self._at = max(self._at, len(held) - (0 if self._quoted else len(close) - 1))
        if not last:
            return None
        naive = held.find(close, len(begin))  # a quote that is never closed hid it
        if naive < 0 or not self._quoted:
            return held[len(begin) :], len(held)
        return held[len(begin) : naive], naive + len(close)


_STOPS = re.compile(f'"|{re.escape(MARKS[1])}'), re.compile(r'["\\]')  # outside and inside of a text of JSON


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{token_hex(12)}", "type": "function", "function": function}


def _calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls in a text, which is a JSON call or a list of calls; else an empty list.

    Arguments are JSON of an object, whatever the model wrote: an object in a text is taken out of it, null is an object
    without members, and a call whose arguments are something else, or numbers that JSON has not, is no call.
    """
    try:
        value = json.loads(text, strict=False)  # a text may hold line feeds as they are
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in values):
            return []
        return [(one["name"], _object(one.get("arguments", one.get("parameters")))) for one in values]
    except (ValueError, RecursionError):
        return []


def _object(arguments: Any) -> str:
    """The JSON of a call's arguments; raises ValueError where they are no object."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments, strict=False) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError("no object")
    return json.dumps(arguments, allow_nan=False)


def _beginning(text: str, mark: str) -> int:
    """The number of characters at the text's end that may begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
