"""Files: read as text, replaced whole or not at all, and the folder for what can be made anew."""

from __future__ import annotations

import atexit
import codecs
import hashlib
import io
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from specdec.errors import CheckpointError, ConfigError, SpecdecError, SpecdecWarning, first_line, shown

__all__ = [
    "append_lines",
    "cache_folder",
    "check_place",
    "check_same_run",
    "decoded",
    "digest_of",
    "drop_unfinished",
    "held",
    "held_folder",
    "parse_json",
    "read_lines",
    "read_object",
    "read_text",
    "refuse_existing",
    "replacing",
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
    """Where this user's programs keep what can be made anew, a folder of specdec's own in it.

    A user without a home folder, as in some containers, has one per process, with a SpecdecWarning.
    """
    try:
        return platformdirs.user_cache_path("specdec")
    except RuntimeError:
        return _passing_folder()


@cache
def _passing_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="specdec-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    text = "this user has no home folder, so nothing is kept for later processes; set HOME, or XDG_CACHE_HOME"
    warnings.warn(text, SpecdecWarning, stacklevel=3)
    return folder


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
    """A JSON value; any fault of the text is a ValueError."""
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
    """Turns errors of a write to disk into an error of the given class that names the content and the path."""
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
    values = []
    try:
        lines = _whole(path).split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}; give another place") from error
    for number, line in enumerate(lines, 1):
        try:
            values.append(read(number, line))
        except ValueError as error:
            raise ConfigError(f"{str(path)!r}, line {number}: no {what}: {error}; {remedy}") from error
    return values


def drop_unfinished(path: Path) -> None:
    """Cut off a last line that a kill cut short."""
    if path.exists():
        os.truncate(path, len(_whole(path)))


def _whole(path: Path) -> bytes:
    data = path.read_bytes() if path.is_file() else b""
    return data[: data.rfind(b"\n") + 1]


def refuse_existing(out: Path) -> None:
    """Raises ConfigError if the file exists or cannot be written."""
    with suppress(OSError):  # `check_place` reports it, for example a name that is too long
        if out.exists():
            raise ConfigError(f"{str(out)!r} exists; delete it, or give another --out")
    check_place(out, "a file")


def check_place(path: Path, what: str, *, folder: bool = False, option: str = "--out") -> None:
    """Raises ConfigError if a file or folder cannot be written; call it before long work. It leaves no file.

    Args:
        path: the path; neither it nor the folders above it need exist.
        what: name of the content, for the message.
        option: the option that gives the path.
    """
    place, row_budget = path.absolute(), "." * 24  # for what stands beside it until it is whole
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(f"{place}{row_budget}")
        if place.exists() and place.is_dir() is not folder:
            raise OSError(f"{str(place)!r} is a {'file' if folder else 'folder'}")
        there = next(one for one in (place if folder else place.parent, *place.parents) if one.exists())
        if not there.is_dir():
            raise OSError(f"{str(there)!r} is a file")
        with tempfile.TemporaryFile(dir=there):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {what} to {shown(str(path), 300)}: {error}; give another {option}") from error


@contextmanager
def held(lock: Path, busy: str, timeout: float = 0) -> Iterator[None]:
    """Hold a lock file. The file stays; the system releases the lock when the process ends.

    Args:
        lock: path of the lock file, in an existing folder.
        busy: the message if another process holds the lock.
        timeout: seconds to wait for the lock.

    Raises:
        ConfigError: another process holds it.
        OSError: it cannot be made.
    """
    from filelock import FileLock, Timeout  # not at the top: it takes a tenth of a second

    try:
        held = FileLock(lock).acquire(timeout=timeout)
    except Timeout as error:  # which is an OSError
        raise ConfigError(busy) from error
    except NotImplementedError as error:
        raise OSError(f"{lock}: {error}") from error
    with held:
        yield


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Hold a run's folder, which is made if it is not there.

    Raises:
        ConfigError: another process holds it, or it is no folder that can be written to.
    """
    busy = f"another run is writing to {str(folder)!r}; wait for it, stop it, or choose another --out"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(folder / ".lock", busy))
        except ConfigError:  # which is a ValueError
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write to {str(folder)!r}: {error}; give another --out") from error
        yield


def check_same_run(path: Path, former: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    """Raises ConfigError, which names the first option that differs, where what lies at a path is of another run."""
    before, after = dict(_options(former)), dict(_options(now))
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            raise ConfigError(
                f"{str(path)!r} is of a run with {key} {shown(before.get(key))}, this one has "
                f"{shown(after.get(key))}; {remedy}"
            )


def _options(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    """All values by their names, those of groups by ``group.name``."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _options(value, f"{group}{name}.")
        else:
            yield f"{group}{name}", value
