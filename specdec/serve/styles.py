"""Calls as Qwen3-Coder writes them, and the styles by their names, of which a chat template shows one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from specdec.serve.call_reading import Broken, Reading, Steps
from specdec.serve.call_styles import Hermes, JsonCalls, LlamaJson, Mistral, Style, Types
from specdec.serve.marks import beginning

__all__ = ["STYLES", "style_of"]


class QwenCoder(Style):
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``: Qwen3-Coder.

    Values are texts as they are, or JSON of other types, which the function's schema tells apart. A value ends at the
    first ``</parameter>`` that a parameter or the function's end follows.
    """

    marks, others = ("<tool_call>", "<function="), ("</tool_call>",)

    def reading(self, types: Types) -> Reading:
        return _Tagged(types)


class _Tagged(JsonCalls):
    """Reads a call in tags, or in JSON behind the same mark."""

    def __init__(self, types: Types) -> None:
        super().__init__(*QwenCoder.marks[:1], *QwenCoder.others)
        self._types = types

    def _calls(self) -> Steps[None]:
        if not self._text.startswith(self._mark):
            self._mark, self._close = QwenCoder.marks[1], ""
        while (head := _HEAD.match(self._text)) is None:
            if _JSON_HEAD.match(self._text):
                yield from super()._calls()
                return
            if not _HEAD_PART.fullmatch(self._text):
                self._at = len(self._mark)
                raise Broken
            yield from self._wait()
        self._at = head.end()
        yield from self._parameters(head[1])
        yield from self._closed()

    def _parameters(self, name: str) -> Steps[None]:
        listed = self._types.get(name, {}).get("properties")
        schemas = listed if isinstance(listed, Mapping) else {}
        self._name, self._pending, between = name, "{", ""
        while (key := (yield from self._tag())) is not None:
            self._pending += f"{between}{json.dumps(key)}: "
            between = ", "
            if (kinds := _kinds(schemas.get(key))) == {"string"}:
                self._pending += '"'
                yield from self._text_to_end(self._as_text)
                self._pending += '"'
            else:
                texts = list[str]()
                yield from self._text_to_end(texts.append)
                self._pending += _json_of("".join(texts), kinds)
            self._give("}")
        self._pending += "}"
        self._give("")
        self._end()

    def _as_text(self, text: str) -> None:
        self._pending += json.dumps(text)[1:-1]
        if text:
            self._give('"}')

    def _tag(self) -> Steps[str | None]:
        """Read the beginning of a parameter, and return its name; None at the function's end."""
        while (found := _TAG.match(self._text, self._at)) is None:
            behind = self.rest.lstrip()
            named = behind.startswith(_TAGS[0]) and len(behind) < _MOST_KEY
            if not (named or _begins_tag(behind)):
                raise Broken
            yield from self._wait()
        self._at = found.end()
        return found[1]

    def _text_to_end(self, give: Callable[[str], None]) -> Steps[None]:
        """Read a value up to its end, without a line feed at either side, and give it to ``give`` as it comes."""
        while self._at == len(self._text):
            yield from self._wait()
        self._at += self._text.startswith("\n", self._at)
        while True:
            found = _VALUE_END.search(self._text, self._at)
            end = len(self._text) - beginning(self._text, "</parameter>") if found is None else found.start()
            known = end - (end > self._at and self._text[end - 1] == "\n")
            give(self._text[self._at : known])
            self._at = known
            if found is not None and found[1] is not None:
                self._at = found.start(1)
                return
            if found is None or _begins_tag(self._text[found.end() :].lstrip()):
                yield from self._wait()
            else:
                give(self._text[known : found.end()])
                self._at = found.end()


_MOST_KEY = 200  # characters of a parameter's tag
_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]{1,200})>")
_HEAD_PART = re.compile(r"<tool_call>\s*(<(f(u(n(c(t(i(o(n(=[^>\n]{0,200})?)?)?)?)?)?)?)?)?)?|<function=[^>\n]{0,200}")
_JSON_HEAD = re.compile(r"<tool_call>\s*[\[{]")
_TAG = re.compile(r"\s*(?:<parameter=([^>\n]+)>|</function>)")
_TAGS = "<parameter=", "</function>"
_VALUE_END = re.compile(r"</parameter>(?:\s*(<parameter=|</function>))?")


def _begins_tag(text: str) -> bool:
    """Whether a text may be the beginning of a tag."""
    return any(tag.startswith(text) for tag in _TAGS)


def _json_of(text: str, kinds: set[str]) -> str:
    """A parameter's value as JSON: a text where its schema takes texts, or else what the text says as JSON."""
    value: Any = text
    lower = text.strip().lower()
    if lower in ("null", "none") and ("null" in kinds or not kinds & {"string", ""}):
        value = None
    elif "string" in kinds:
        pass
    elif lower in ("true", "false") and kinds & {"boolean", ""}:
        value = lower == "true"
    else:
        with suppress(ValueError):
            value = json.loads(text, strict=False)
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise Broken from None


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
