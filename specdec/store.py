"""What specdec remembers about this machine between runs: small JSON files in the user's cache folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "write_json"]


def cache_folder() -> Path:
    """Where measurements live; made when something is written. XDG's variable moves it, as it does other programs'."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "specdec"


def write_json(path: Path, content: Any) -> bool:
    """Write a file as a whole or not at all; False where the folder takes none, which costs a measurement next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
        Path(beside).replace(path)
    except OSError:
        with suppress(OSError):
            Path(beside).unlink()
        return False
    return True
