"""Tool calls in an answer's text: forced calls, which are the whole text, and calls that the model itself marks."""

from __future__ import annotations

import json
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
        begin, end = MARKS
        while True:
            start = self._held.find(begin)
            if start < 0:
                keep = 0 if last else _beginning(self._held, begin)
                cut = len(self._held) - keep
                found += [{"content": self._held[:cut]}] if cut else []
                self._held = self._held[cut:]
                return found
            close = self._held.find(end, start)
            if close < 0 and not last:
                found += [{"content": self._held[:start]}] if start else []
                self._held = self._held[start:]
                return found
            stop = len(self._held) if close < 0 else close + len(end)
            inside = self._held[start + len(begin) : None if close < 0 else close]
            calls = _calls(inside)
            before = self._held[: start if calls else stop]
            found += [{"content": before}] if before.strip() or not calls else []
            found += self._numbered(calls)
            self._held = self._held[stop:].lstrip() if calls else self._held[stop:]

    def _numbered(self, calls: list[tuple[str, str]]) -> list[Delta]:
        first, self.count = self.count, self.count + len(calls)
        return [{"tool_calls": [_call(first + place, *call)]} for place, call in enumerate(calls)]


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"call_{token_hex(12)}", "type": "function", "function": function}


def _calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments of the calls in a text, which is a JSON call or a list of calls; else an empty list."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in values):
        return []
    return [(one["name"], json.dumps(one.get("arguments", one.get("parameters", {})))) for one in values]


def _beginning(text: str, mark: str) -> int:
    """The number of characters at the text's end that may begin the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
