"""Pointers that a clone without git-lfs has in the place of large files."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import CheckpointError

__all__ = ["refuse_pointer", "refuse_pointers"]

_HEAD = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError where a file is git-lfs's pointer to it, and not the file."""
    with path.open("rb") as file:
        if file.read(len(_HEAD)) == _HEAD:
            raise CheckpointError(
                f"{str(path)!r} is a pointer of git-lfs and not the file, which was not fetched; run `git lfs install` "
                "and `git lfs pull` in the clone, or download the file"
            )


def refuse_pointers(folder: Path) -> None:
    """Raises CheckpointError where one of a folder's files is such a pointer."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size < 1024:
            refuse_pointer(path)
