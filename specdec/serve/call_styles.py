"""Styles of tool calls: how families of models write a call into their text, and how it is read.

A style is told by the chat template. Its reader looks at each character of a call once, however the text comes.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from secrets import choice, token_hex
from string import ascii_letters, digits
from typing import Any, ClassVar

from specdec.serve.marks import beginning

__all__ = ["STYLES", "Call", "Reading", "Style", "Types", "json_calls", "style_of"]

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


class QwenCoder(Style):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder.

    Values are texts as they are, or JSON of other types, which the function's schema tells apart. A value ends at the
    first ``</parameter>`` that a parameter or the function's end follows.
    """

    marks, others = ("<tool_call>", "<function="), ("</tool_call>",)

    def reading(self, types: Types) -> Reading:
        return _Tagged(types)


class _Tagged(Reading):
    def __init__(self, types: Types) -> None:
        self._types, self._at, self._name = types, 0, ""
        self._key: str | None = None  # of the parameter that is read
        self._value = 0  # where its value begins
        self._values: dict[str, str] = {}
        self._json: Reading | None = None  # of a call that is written as Hermes does

    def end(self, held: str, last: bool) -> tuple[list[Call], int] | None:
        if self._json is None and not self._name:
            head = _HEAD.match(held)
            if head is None:
                if _JSON_HEAD.match(held):
                    self._json = _Marked()
                elif last or not _HEAD_PART.fullmatch(held):
                    return [], next(len(mark) for mark in QwenCoder.marks if held.startswith(mark))
                else:
                    return None
            else:
                self._name, self._at = head[1], head.end()
        if self._json is not None:
            return self._json.end(held, last)
        while (tag := self._next(held)) is not None:
            if tag == "":
                return self._whole(held, last)
        return ([], len(held)) if last else None

    def _next(self, held: str) -> str | None:
        """The next parameter's name, once it is whole; ``""`` at the function's end, None where more is needed."""
        if self._key is None:
            found = _TAG.match(held, self._at)
            if found is None:
                return None
            self._at, self._value = found.end(), found.end()
            if found[1] is None:
                return ""
            self._key = found[1]
        while found := _VALUE_END.search(held, self._at):
            if found[1] is None:  # what follows is not known, or not there yet
                self._at = found.start() if _open_end(held, found.end()) else found.end()
                if self._at == found.start():
                    return None
                continue
            value = held[self._value : found.start()]
            self._values[self._key] = value.removeprefix("\n").removesuffix("\n")
            self._at, key, self._key = found.start(1), self._key, None
            return key
        self._at = max(self._at, len(held) - len("</parameter>") + 1)
        return None

    def _whole(self, held: str, last: bool) -> tuple[list[Call], int] | None:
        end = self._at
        if held.startswith(Hermes.marks[0]):
            behind = held[end:].lstrip()
            if behind.startswith(close := Hermes.others[0]):
                end = len(held) - len(behind) + len(close)
            elif close.startswith(behind) and not last:
                self._at, self._key = _before(held, end), None  # the tag is read again
                return None
        parameters = self._types.get(self._name, {}).get("properties")
        schemas = parameters if isinstance(parameters, Mapping) else {}
        try:
            arguments = {key: _typed(value, schemas.get(key)) for key, value in self._values.items()}
            return [(self._name, json.dumps(arguments, allow_nan=False))], end
        except (ValueError, RecursionError):
            return [], end


_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]{1,200})>")
_HEAD_PART = re.compile(r"<tool_call>\s*(<(f(u(n(c(t(i(o(n(=[^>\n]{0,200})?)?)?)?)?)?)?)?)?)?|<function=[^>\n]{0,200}")
_JSON_HEAD = re.compile(r"<tool_call>\s*[\[{]")
_TAG = re.compile(r"\s*(?:<parameter=([^>\n]+)>|</function>)")
_VALUE_END = re.compile(r"</parameter>(?:\s*(<parameter=|</function>))?")


def _open_end(held: str, at: int) -> bool:
    """Whether what stands behind a parameter's end may still become a tag."""
    behind = held[at:].lstrip()
    return any(tag.startswith(behind) for tag in ("<parameter=", "</function>"))


def _before(held: str, end: int) -> int:
    return held.rindex("</function>", 0, end)


def _typed(text: str, schema: Any) -> Any:
    """A parameter's value: a text where its schema takes texts alone, or else what the text says as JSON."""
    kinds = _kinds(schema)
    lower = text.strip().lower()
    if lower in ("null", "none") and ("null" in kinds or not kinds & {"string", ""}):
        return None
    if "string" in kinds:
        return text
    if lower in ("true", "false") and kinds & {"boolean", ""}:
        return lower == "true"
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; ``""`` where it does not say."""
    if not isinstance(schema, Mapping):
        return {""}
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(map(str, named)) if isinstance(named, list) else set()
    for several in ("anyOf", "oneOf"):
        for one in schema[several] if isinstance(schema.get(several), list) else ():
            kinds |= _kinds(one)
    for value in schema["enum"] if isinstance(schema.get("enum"), list) else ():
        kinds |= {"string"} if isinstance(value, str) else set()
    return kinds or {""}


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

STYLES: dict[str, Style] = {
    "hermes": Hermes(),
    "qwen3_coder": QwenCoder(),
    "llama3_json": LlamaJson(),
    "mistral": Mistral(),
}


def style_of(template: Any) -> str | None:
    """The name of the style that a chat template asks for; None where it shows none of them."""
    if not isinstance(template, str):
        return None
    if "<tool_call>" in template:
        return None if "<arg_key>" in template else "qwen3_coder" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    named: Sequence[str] = ('"parameters"', '{"name":')
    return "llama3_json" if all(text in template for text in named) else None
