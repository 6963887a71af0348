"""Files: read as text, replaced whole or not at all, and the folder for what can be made anew."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

from specdec.errors import CheckpointError, ConfigError, first_line, shown

__all__ = [
    "cache_folder",
    "digest_of",
    "drop_unfinished",
    "parse_json",
    "read_object",
    "read_text",
    "replacing",
    "resume",
    "whole_lines",
    "write_json",
    "write_text",
]


def cache_folder() -> Path:
    """Where this user's programs keep what can be made anew, a folder of specdec's own in it."""
    return platformdirs.user_cache_path("specdec")


def read_text(path: Path, what: str, remedy: str) -> str:
    """A file's text.

    Raises:
        ConfigError: there is none, or it is not UTF-8; the message names ``what`` it should be, and the remedy.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no such text, or no such name
        raise ConfigError(f"cannot read {what} {str(path)!r}: {error}; {remedy}") from error


def parse_json(text: str | bytes) -> Any:
    """A JSON value; whatever is wrong with the text is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file that came with weights.

    Raises:
        CheckpointError: no JSON, or no object; too deep, or with a number too long, to be read at all.
    """
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {str(path)!r}: {first_line(error)}; mend it, or download it anew"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{str(path)!r} holds {shown(value)}, of type {type(value).__name__}; it must be a JSON object: mend it, "
            "or download it anew"
        )
    return value


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place beside ``path`` for a file or a folder, which stands at ``path`` once the block has ended well.

    A reader finds the old one or the new one. Where writing or moving fails, the old one is as it was and nothing
    else is left.

    Raises:
        OSError: no room, or no permission.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays, as some writers go by it.
    new, old = (path.with_name(f".{path.stem}.{os.getpid()}.{kind}{path.suffix}") for kind in ("new", "old"))
    try:
        yield new
        if new.is_dir() and path.exists():  # a folder is no file that a move could replace
            path.rename(old)
        new.replace(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        for left in (new, old):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file by a text; OSError as ``replacing``."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value as JSON; OSError as ``replacing``."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that is appended to, less a last one that a kill cut short; none where there is no file."""
    return _whole(path).split(b"\n")[:-1]


def drop_unfinished(path: Path) -> None:
    """Cut off a last line that a kill cut short."""
    if path.exists():
        os.truncate(path, len(_whole(path)))


def _whole(path: Path) -> bytes:
    data = path.read_bytes() if path.is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def resume(
    partial: Path, header: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]
) -> list[dict[str, Any]]:
    """The lines of the same run's unfinished file, less one that a kill cut short; a new file gets its header.

    ``check`` raises ValueError for a line below the header that is none of such a run's.

    Raises:
        ConfigError: it is another run's, or a line is none of its.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished(partial)
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(whole_lines(partial), 1):
        try:
            line = parse_json(text)
            if not isinstance(line, dict):
                raise ValueError(f"it holds {type(line).__name__}, not an object")
            if number > 1:
                check(line)
        except ValueError as error:
            raise ConfigError(
                f"{str(partial)!r}, line {number}: no line of an unfinished run: {error}; delete that line and all "
                "below it, and the same command goes on from there"
            ) from error
        lines.append(line)
    if not lines:
        write_text(partial, json.dumps(header) + "\n")
        return []
    if (before := lines[0]) != header:
        key = next(key for key in sorted({*before, *header}) if before.get(key) != header.get(key))
        raise ConfigError(
            f"{str(partial)!r} is of a run with {key} {before.get(key)!r}, this one has {header.get(key)!r}; give the "
            "same options to go on with it, another --out, or delete it"
        )
    return lines[1:]
