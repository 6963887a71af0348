"""Calls as Qwen3-Coder writes them, and the styles by their names, of which a chat template shows one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from specdec.serve.call_styles import Call, Hermes, LlamaJson, Mistral, Reading, Style, Types

__all__ = ["STYLES", "style_of"]


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
                    self._json = Hermes().reading(self._types)
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
    named = ('"parameters"', '{"name":')
    return "llama3_json" if all(text in template for text in named) else None
