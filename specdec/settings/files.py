"""Files: read as text, replaced whole or not at all, and the folder for what can be made anew."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from specdec.errors import CheckpointError, ConfigError, SpecdecError, SpecdecWarning, first_line, shown

__all__ = [
    "Unfinished",
    "append_lines",
    "cache_folder",
    "check_same_run",
    "decoded",
    "digest_of",
    "drop_unfinished",
    "parse_json",
    "read_lines",
    "read_object",
    "read_text",
    "refuse_existing",
    "replacing",
    "unfinished",
    "write_json",
    "write_text",
    "writing",
]

T = TypeVar("T")

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # which begins as UTF-16's does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_PACKED = {
    b"\x1f\x8b": "compressed by gzip; unpack it",
    b"BZh": "compressed by bzip2; unpack it",
    b"\xfd7zXZ\0": "compressed by xz; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"PAR1": "a Parquet table; make JSON lines of it",
    b"ARROW1": "an Arrow table; make JSON lines of it",
    b"%PDF-": "a PDF; make text of it",
}


def cache_folder() -> Path:
    """Where this user's programs keep what can be made anew, a folder of specdec's own in it."""
    return platformdirs.user_cache_path("specdec")


def read_text(path: Path, what: str, remedy: str) -> str:
    """A file's text, as ``decoded`` reads it.

    Raises:
        ConfigError: there is none; the message names ``what`` it should be, and the remedy.
    """
    try:
        return decoded(path.read_bytes())
    except (OSError, ValueError) as error:  # no such text, or no such name
        raise ConfigError(f"cannot read {what} {str(path)!r}: {error}; {remedy}") from error


def decoded(data: bytes) -> str:
    """The text of bytes in UTF-8, or in what a byte order mark says, which is no part of it; lines end in ``\\n``.

    Raises:
        ValueError: it is no text; compressed files are named.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
        if "\0" not in text:
            return io.StringIO(text, newline=None).getvalue()
        reason = "it holds bytes of zero, as binary files do, and UTF-16 without a byte order mark"
    except UnicodeDecodeError as error:
        reason = str(error)
    raise ValueError(next((f"it is {kind}" for begin, kind in _PACKED.items() if data.startswith(begin)), reason))


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


@contextmanager
def writing(what: str, path: Path, remedy: str, kind: type[SpecdecError] = CheckpointError) -> Iterator[None]:
    """Turns what a disk can do to a write into an error of a kind, which says what could not be written, and where."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot write {what} {str(path)!r}: {error}; {remedy}") from error


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


def append_lines(path: Path, *values: Any) -> None:
    """Add values to a file of JSON lines, for good: they are on the disk when this returns.

    Raises:
        OSError: no room, or no permission; a line that the disk took half of is dropped when the file is read.
    """
    lines = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n" for value in values]
    with path.open("ab") as file:
        file.write("".join(lines).encode("utf-8", "replace"))
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, read: Callable[[int, bytes], T], what: str, remedy: str) -> list[T]:
    """A file that is appended to: what ``read`` makes of each line's number, from 1, and text.

    A last line that a kill cut short is none, and where there is no file, there are no lines.

    Raises:
        ConfigError: the file cannot be read, or ``read`` raised ValueError for a line, which is no ``what``.
    """
    found = []
    try:
        lines = _whole(path).split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}; give another place") from error
    for number, line in enumerate(lines, 1):
        try:
            found.append(read(number, line))
        except ValueError as error:
            raise ConfigError(f"{str(path)!r}, line {number}: no {what}: {error}; {remedy}") from error
    return found


def drop_unfinished(path: Path) -> None:
    """Cut off a last line that a kill cut short."""
    if path.exists():
        os.truncate(path, len(_whole(path)))


def _whole(path: Path) -> bytes:
    data = path.read_bytes() if path.is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def refuse_existing(out: Path) -> None:
    """Raises ConfigError where there is such a file."""
    if out.exists():
        raise ConfigError(f"{str(out)!r} exists; delete it, or give another --out")


def check_same_run(path: Path, former: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    """Raises ConfigError, which names the first difference, where what lies at a path is of another run than this."""
    for key in sorted({*former, *now}):
        if former.get(key) != now.get(key):
            raise ConfigError(
                f"{str(path)!r} is of a run with {key} {former.get(key)!r}, this one has {now.get(key)!r}; {remedy}"
            )


class Unfinished:
    """The lines of a file that is not finished, each the answer to one of many prompts.

    Attributes:
        done: number of the prompt -> line.
    """

    def __init__(
        self, partial: Path, header: Mapping[str, Any], prompts: int, check: Callable[[Mapping[str, Any]], None]
    ) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        drop_unfinished(partial)

        def read(number: int, text: bytes) -> dict[str, Any]:
            line = parse_json(text)
            if not isinstance(line, dict):
                raise ValueError(f"it holds {type(line).__name__}, not an object")
            if number > 1:
                if type(line.get("index")) is not int or not 0 <= line["index"] < prompts:
                    raise ValueError(f"it holds no answer to one of {prompts} prompts")
                check(line)
            return line

        remedy = "delete that line and all below it, and the same command goes on from there"
        former, *lines = read_lines(partial, read, "line of an unfinished run", remedy) or [dict(header)]
        check_same_run(partial, former, header, "give the same options to go on with it, another --out, or delete it")
        if not lines:
            write_text(partial, json.dumps(header) + "\n")
        self._partial, self._prompts = partial, prompts
        self.done = {line["index"]: line for line in lines}

    @property
    def left(self) -> list[int]:
        """The prompts that have no answer yet."""
        return [index for index in range(self._prompts) if index not in self.done]

    def add(self, index: int, line: Mapping[str, Any]) -> None:
        """Keep the answer to a prompt."""
        self.done[index] = {"index": index, **line}
        append_lines(self._partial, self.done[index])


@contextmanager
def unfinished(
    out: Path, run: Mapping[str, Any], prompts: Sequence[Any], check: Callable[[Mapping[str, Any]], None]
) -> Iterator[Unfinished]:
    """The answers so far to all of ``prompts``: lines of the file's name + ``.partial``, until ``out`` is written.

    Where the block is interrupted (Ctrl-C), a SpecdecWarning says what is kept.

    Args:
        out: the file, which the block writes once nothing is left.
        run: JSON values that say what this run is; the unfinished file of another is refused.
        prompts: JSON values; the unfinished file answers these and no others.
        check: raises ValueError for a line that is none of such a run's.

    Raises:
        ConfigError: ``out`` exists, or is half done with other options.
        CheckpointError: the disk refuses.
    """
    refuse_existing(out)
    partial = out.with_name(out.name + ".partial")
    asked = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    with writing("the answers", out, "make room, and the same command goes on where it was"):
        answers = Unfinished(partial, {**run, "prompts": len(prompts), "asked": asked}, len(prompts), check)
        try:
            yield answers
        except KeyboardInterrupt:
            if answers.done:
                kept = f"{len(answers.done)} of {len(prompts)} answers are kept; the same command goes on from there"
                warnings.warn(f"interrupted: {kept}", SpecdecWarning, stacklevel=2)
            raise
        partial.unlink()
