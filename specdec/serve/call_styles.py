"""Styles of tool calls: how families of models write a call into their text, and how it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from secrets import choice, token_hex
from string import ascii_letters, digits
from typing import Any, ClassVar

from specdec.serve.call_reading import Broken, Reading, Steps, loaded
from specdec.serve.marks import beginning

__all__ = ["Hermes", "JsonCalls", "LlamaJson", "Mistral", "Style", "Types"]

Types = Mapping[str, Mapping[str, Any]]
"""Names of functions -> their parameters' JSON schemas."""


class Style:
    """A way to write calls; without marks, none are looked for."""

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
        """A reader of the calls behind one mark."""
        raise NotImplementedError

    def new_id(self) -> str:
        """A call's id."""
        return f"call_{token_hex(12)}"


class JsonCalls(Reading):
    """Reads a call, or a list of calls, each an object with the function's name and its arguments.

    Args:
        mark: see :class:`Reading`.
        close: what may follow the calls, as a part of them.
        named: whether a call may be its function's name and, behind it, its arguments.
    """

    def __init__(self, mark: str = "", close: str = "", *, named: bool = False) -> None:
        super().__init__(mark)
        self._close, self._is_named = close, named

    def _calls(self) -> Steps[None]:
        if self._text.startswith(self._mark):
            self._at = len(self._mark)
        first = yield from self._next()
        if first == "{":
            yield from self._call()
        elif first == "[":
            behind = ","
            while behind == ",":
                self._at += 1
                yield from self._next()
                yield from self._call()
                behind = yield from self._next()
            if behind != "]":
                raise Broken
            self._at += 1
        else:
            yield from self._named()
        yield from self._closed()

    def _closed(self) -> Steps[None]:
        """Read what may follow calls."""
        while self._close and not self._last:
            behind = self.rest.lstrip()
            if not self._close.startswith(behind) or behind == self._close:
                break
            yield
        behind = self.rest.lstrip()
        if self._close and behind.startswith(self._close):
            self._at = len(self._text) - len(behind) + len(self._close)

    def _named(self) -> Steps[None]:
        """Read a function's name and its arguments."""
        while True:
            name, brace, _ = self.rest.partition("{")
            found = _NAMED.fullmatch(name) if self._is_named else None
            if found is not None and brace:
                self._at += len(name)
                yield from self._arguments(found[1])
                return
            if not self._is_named or brace or len(name) > _MOST_NAME:
                raise Broken
            yield from self._wait()

    def _call(self) -> Steps[None]:
        """Read a call as an object."""
        if not self._text.startswith("{", self._at):
            raise Broken
        self._at += 1
        members, given, behind = dict[str, Any](), False, ","
        while behind == ",":
            self._pending = ""
            yield from self._key()
            key = json.loads(self._pending[: self._pending.rindex(":")])
            first = yield from self._next()
            self._pending, name = "", members.get("name")
            if key in ("arguments", "parameters") and first == "{" and isinstance(name, str) and not given:
                yield from self._arguments(name)
                given = True
            else:
                members[key] = loaded((yield from self._value()))
            behind = yield from self._next()
            self._at += 1
        if behind != "}":
            raise Broken
        if not given:
            self._whole(members)

    def _whole(self, members: Mapping[str, Any]) -> None:
        """Give out a call whose arguments were not seen to be an object, or came before its name, as a whole.

        An object in a text is taken out of it, and null is an object without members; others are no call.
        """
        name, arguments = members.get("name"), members.get("arguments", members.get("parameters"))
        if isinstance(arguments, str):
            arguments = loaded(arguments.strip() or "null")
        if not isinstance(name, str) or not isinstance(arguments, Mapping | None):
            raise Broken
        self._name, self._pending = name, json.dumps(arguments or {})
        self._give("}")
        self._end()


_MOST_NAME = 200  # characters of a function's name, and of a call's id beside it
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")


class Hermes(Style):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, SmolLM."""

    marks, others = ("<tool_call>",), ("</tool_call>",)

    def reading(self, types: Types) -> Reading:
        return JsonCalls(self.marks[0], self.others[0])


class LlamaJson(Style):
    """``{"name": ..., "parameters": {...}}`` as the whole answer, or several with ``;`` between: Llama 3."""

    marks, between = ("<|python_tag|>",), " \t\r\n;"

    def find(self, held: str, fresh: bool) -> tuple[int, int]:
        blank = len(held) - len(held.lstrip(self.between))
        if fresh and held[blank : blank + 1] == "{":
            return blank, 0
        return super().find(held, fresh)

    def reading(self, types: Types) -> Reading:
        return JsonCalls(self.marks[0])


class Mistral(Style):
    """``[TOOL_CALLS]`` and a list of JSON calls, or ``[TOOL_CALLS]NAME[ARGS]{...}``: Mistral."""

    marks, others = ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]")

    def reading(self, types: Types) -> Reading:
        return JsonCalls(self.marks[0], named=True)

    def new_id(self) -> str:
        return "".join(choice(ascii_letters + digits) for _ in range(9))  # what its templates take
