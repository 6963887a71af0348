"""The Python standard library as a corpus: available on every machine without a download, split by file name.

A hash of a file's path within the library decides whether it is held out, so the split is the same on every machine and
for every Python version that has the file.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["HELD_OUT_ONE_IN", "STDLIB", "is_held_out", "read_files"]

STDLIB = "stdlib"
"""The name that stands for the corpus in place of a file."""

HELD_OUT_ONE_IN = 20

# Generated tables, and files whose text is not code: they would teach the model to count, not to write Python.
_SKIPPED_FOLDERS = {"site-packages", "encodings", "__pycache__", "pydoc_data", "data"}
_SMALLEST, _LARGEST = 400, 300_000  # bytes; smaller files are empty packages, larger ones generated tables


def is_held_out(relative_path: str) -> bool:
    """Whether training must not use the library file at this POSIX path (``"email/message.py"``)."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def read_files(*, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yield ``(relative path, text)`` for one side of the split, sorted by path.

    Files that are not UTF-8, very short or very long are left out, and so are folders of tables and test data.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        wanted = not _SKIPPED_FOLDERS.intersection(relative.parts[:-1]) and _SMALLEST <= path.stat().st_size <= _LARGEST
        if wanted and is_held_out(relative.as_posix()) is held_out:
            with suppress(UnicodeDecodeError):
                yield relative.as_posix(), path.read_text(encoding="utf-8")
