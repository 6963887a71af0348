"""Formats of data files: JSON records, text, or refused. Every reader of data calls ``read_content``.

=======================  ========================================================================================
its name ends in         it is
=======================  ========================================================================================
.json .jsonl .ndjson     records: a JSON list's, one JSON value, or JSON lines; refused if it is no JSON
.csv and the like        refused, as are compressed files and tables whatever they are called
anything else            records if its content is JSON; refused if it begins as JSON and is none; else text, if the
                         name is one of text or source code (Pygments' list), and refused if it is not
=======================  ========================================================================================

Case does not matter. Text is UTF-8, or has a byte order mark, which is no part of it; lines may end as on Windows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pygments.lexers import find_lexer_class_for_filename

from specdec.errors import ConfigError
from specdec.settings.files import parse_json, read_text

__all__ = ["LINES", "Record", "json_records", "read_content", "read_records"]

LINES = (".jsonl", ".ndjson", ".jsonlines")
"""Suffixes, in small letters, of JSON lines."""

_JSON = (".json", *LINES)
_TABLES = (".csv", ".tsv")
_HOLDS = "it must hold a list of records (conversations, or prompts), or one record a line"
_MORE_TEXT = (".text", ".log", ".adoc")  # that Pygments has no language for
_BEGINS_AS_JSON = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:[^"\\\n]|\\.)*"\s*:')


@dataclass(frozen=True, slots=True)
class Record:
    """A value, and where it stands: a number, from 1, of the file's lines, or of its records where it is a list.

    ``error`` is what is wrong with a line that is no JSON, and has no value.
    """

    value: Any
    number: int
    kind: Literal["line", "record"]
    error: str | None = None

    @property
    def place(self) -> str:
        """Such as ``line 3``."""
        return f"{self.kind} {self.number}"


def read_content(path: Path, what: str = "the data file", *, strict: bool = True) -> list[Record] | str:
    """The records, or else the text, of a file; the module says which files are what.

    Args:
        path: the file.
        what: it should be, for messages.
        strict: refuse JSON lines one of which is no JSON; otherwise that is a record with an ``error``.

    Raises:
        ConfigError: it cannot be read, or is neither.
    """
    text = read_text(path, what, "give UTF-8 text or JSON")
    suffix = path.suffix.lower()
    if suffix in _JSON:
        return _records(path, what, text, strict)
    if suffix in _TABLES:
        raise ConfigError(f"{what} {str(path)!r} is a table, which is not read; make JSON lines of it")
    if _is_json(text):
        return _records(path, what, text, strict)
    if suffix not in _MORE_TEXT and find_lexer_class_for_filename(path.name.lower()) is None:
        raise ConfigError(
            f"{what} {str(path)!r} is no JSON, and its name does not say what else it is; if it is text, call it "
            f"{path.stem + '.txt'!r}"
        )
    return text


def read_records(path: Path, what: str = "the data file") -> list[Record]:
    """The records of a file that has to hold JSON, whatever it is called.

    Raises:
        ConfigError: it cannot be read, or is no JSON.
    """
    return _records(path, what, read_text(path, what, "give JSON"), True)


def json_records(text: str) -> list[Record] | None:
    """The records of a text that is JSON throughout; None for any other."""
    try:
        return _records(Path(), "", text, True) if _is_json(text) else None
    except ConfigError:
        return None


def _is_json(text: str) -> bool:
    """Whether a text is meant to be JSON: lists and objects, as any word or number is JSON, too."""
    try:
        return isinstance(parse_json(text), list | dict)
    except ValueError:
        lines = [line for line in map(str.strip, text.split("\n")) if line]
        objects = sum(line.startswith("{") and isinstance(_value(line), dict) for line in lines)
        return bool(_BEGINS_AS_JSON.match(text)) or 2 * objects > len(lines)


def _value(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return None


def _records(path: Path, what: str, text: str, strict: bool) -> list[Record]:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    by_line = path.suffix.lower() in LINES
    if not lines:
        if by_line:
            return []
        raise ConfigError(f"{what} {str(path)!r} is empty; {_HOLDS}")
    try:
        whole = parse_json(text)
    except ValueError as error:
        # Of a list or an object that is broken, the first line is none by itself.
        opened = text.lstrip().startswith("[") and _value(lines[0][1]) is None
        if opened or not (by_line or any(isinstance(_value(line), dict | list | str) for _, line in lines)):
            raise _no_json(path, what, error) from error
        return [_record(path, what, number, line, strict) for number, line in lines]
    if isinstance(whole, list):
        return [Record(value, number, "record") for number, value in enumerate(whole, 1)]
    return [Record(whole, lines[0][0], "line")]


def _record(path: Path, what: str, number: int, line: str, strict: bool) -> Record:
    try:
        return Record(parse_json(line), number, "line")
    except ValueError as error:
        if strict:
            raise _no_json(path, what, error, f", line {number}") from error
        return Record(None, number, "line", f"a line that is no JSON: {getattr(error, 'msg', error)}")


def _no_json(path: Path, what: str, error: ValueError, place: str = "") -> ConfigError:
    reason = getattr(error, "msg", error) if place else error  # which counts its lines from this one
    hint = "" if path.suffix.lower() in _JSON else "; text that only begins as JSON does needs another first line"
    return ConfigError(f"{what} {str(path)!r}{place} is no JSON: {reason}; {_HOLDS}{hint}")
