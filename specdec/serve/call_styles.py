"""Styles of tool calls: how families of models write a call into their text, and how it is read.

A style's reader looks at each character of a call once, however the text comes.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from secrets import choice, token_hex
from string import ascii_letters, digits
from typing import Any, ClassVar

from specdec.serve.marks import beginning

__all__ = ["Call", "Hermes", "LlamaJson", "Mistral", "Reading", "Style", "Types", "json_calls"]

Call = tuple[str, str]
"""A function's name, and the JSON of its arguments, which is an object."""

Types = Mapping[str, Mapping[str, Any]]
"""Names of functions -> their parameters' JSON schemas."""


class Reading(ABC):
    """Reads one call. The held text begins with it, and only grows."""

    @abstractmethod
    def end(self, held: str, last: bool) -> tuple[list[Call], int] | None:
        """The calls, none where the text holds none, and where they end; None where more of the text is needed."""


class Style:
    """A way to write calls."""

    marks: tuple[str, ...] = ()
    """Texts of which one begins a call."""
    others: tuple[str, ...] = ()
    """Further texts of a call that a vocabulary may have as special tokens."""
    between: ClassVar[str | None] = None
    """Characters between calls that are no content; None: white space."""

    def find(self, held: str, fresh: bool) -> tuple[int, int]:
        """Where a call may begin, or -1, and the number of characters at the end that may begin one.

        Args:
            held: the text.
            fresh: whether the text has had no content, apart from calls.
        """
        starts = [at for mark in self.marks if (at := held.find(mark)) >= 0]
        return min(starts, default=-1), max((beginning(held, mark) for mark in self.marks), default=0)

    def reading(self, types: Types) -> Reading:
        """A reader of one call."""
        raise NotImplementedError

    def new_id(self) -> str:
        """A call's id."""
        return f"call_{token_hex(12)}"


def json_calls(text: str) -> list[Call]:
    """The calls in a text, which is JSON of a call or of a list of calls; else an empty list.

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


class Hermes(Style):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, SmolLM."""

    marks, others = ("<tool_call>",), ("</tool_call>",)

    def reading(self, types: Types) -> Reading:
        return _Marked()


class _Marked(Reading):
    """Looks for the end of a marked call: a mark that is in no text of its JSON."""

    def __init__(self) -> None:
        self._at, self._quoted = len(Hermes.marks[0]), False

    def end(self, held: str, last: bool) -> tuple[list[Call], int] | None:
        found = self._inside(held, last)
        return None if found is None else (json_calls(found[0]), found[1])

    def _inside(self, held: str, last: bool) -> tuple[str, int] | None:
        """What stands between the marks, and where the closing one ends."""
        (begin,), (close,) = Hermes.marks, Hermes.others
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


_STOPS = re.compile(f'"|{re.escape(Hermes.others[0])}'), re.compile(r'["\\]')  # outside and inside of a text of JSON


class LlamaJson(Style):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, or several with ``;`` between: Llama 3."""

    marks, between = ("<|python_tag|>",), " \t\r\n;"

    def find(self, held: str, fresh: bool) -> tuple[int, int]:
        blank = len(held) - len(held.lstrip(self.between))
        if fresh and held[blank : blank + 1] == "{":
            return blank, 0
        return super().find(held, fresh)

    def reading(self, types: Types) -> Reading:
        return _Braces(self.marks[0])


class Mistral(Style):
    """``[TOOL_CALLS]`` and a list of JSON calls, or ``[TOOL_CALLS]NAME[ARGS]{...}``: Mistral."""

    marks, others = ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]")

    def reading(self, types: Types) -> Reading:
        return _Braces(self.marks[0], named=True)

    def new_id(self) -> str:
        return "".join(choice(ascii_letters + digits) for _ in range(9))  # what its templates take


class _Braces(Reading):
    """Looks for the end of JSON in brackets, behind a mark that may be missing, and a name where calls have one."""

    def __init__(self, mark: str, *, named: bool = False) -> None:
        self._mark, self._named, self._name = mark, named, ""
        self._begin = self._at = 0
        self._depth, self._quoted = 0, False

    def end(self, held: str, last: bool) -> tuple[list[Call], int] | None:
        if not self._at and (wrong := self._opened(held)) is not None:
            return ([], len(held)) if last and wrong == 0 else None if wrong == 0 else ([], wrong)
        while found := _BRACKETS[self._quoted].search(held, self._at):
            if found[0] == "\\":
                if found.end() == len(held):
                    break
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if found[0] == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if found[0] in "[{" else -1
                if self._depth == 0:
                    return self._calls(held[self._begin : self._at]), self._at
        else:
            self._at = len(held)
        return ([], len(held)) if last else None

    def _opened(self, held: str) -> int | None:
        """None once the JSON has begun; 0 where more is needed; else where a text ends that is no call."""
        start = len(self._mark) if held.startswith(self._mark) else 0
        behind = held[start:].lstrip()
        if not behind:
            return 0
        begin = len(held) - len(behind)
        if self._named and behind[0] != "[":
            brace = held.find("{", begin)
            name = _NAME.fullmatch(held[begin:brace] if brace >= 0 else held[begin:])
            if name is None and (brace >= 0 or len(behind) > _MOST_NAME):
                return start
            if brace < 0 or name is None:
                return 0
            self._name, begin = name[1], brace
        elif behind[0] not in "[{":
            return start or len(held)
        self._begin = self._at = begin
        return None

    def _calls(self, text: str) -> list[Call]:
        if not self._name:
            return json_calls(text)
        try:
            return [(self._name, _object(json.loads(text, strict=False)))]
        except (ValueError, RecursionError):
            return []


_BRACKETS = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
_MOST_NAME = 200  # characters of a function's name and its call's id
