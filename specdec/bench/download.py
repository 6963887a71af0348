"""Download: Spec-Bench's question file, with a checksum."""

from __future__ import annotations

import hashlib
import os
import urllib.request
from collections import Counter
from pathlib import Path

from specdec.bench.questions import group_of, read_questions
from specdec.errors import ConfigError

__all__ = ["SPEC_BENCH_URL", "download_spec_bench", "spec_bench_path"]

SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"

_GROUPS = dict.fromkeys(("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80)


def spec_bench_path() -> Path:
    """Where the file is kept: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "specdec" / "spec_bench" / "question.jsonl"


def download_spec_bench(
    sha256: str | None = None, url: str = SPEC_BENCH_URL, timeout: float = 30.0
) -> tuple[Path, str]:
    """Fetch the file unless it is there; returns its path and its SHA-256.

    The authors publish no checksum. ``sha256`` is compared where it is given; in any case the file must hold 80
    questions in each of the six subtasks, and a file that was fetched earlier must still be the one that was fetched.

    Raises:
        ConfigError: no network, a wrong checksum, or a file that is not Spec-Bench's.
    """
    path = spec_bench_path()
    note = path.with_suffix(".sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        part = path.with_suffix(".part.jsonl")
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                part.write_bytes(answer.read())
        except (OSError, ValueError) as error:  # URLError is an OSError
            raise ConfigError(
                f"cannot fetch {url}: {error}; on a machine with a network save it as {str(path)!r} and run this again"
            ) from error
        _check(part, sha256)
        part.replace(path)
        note.write_text(_digest(path) + "\n", encoding="ascii")
    if sha256 is None and note.is_file():
        sha256 = note.read_text(encoding="ascii").strip()
    _check(path, sha256)
    return path, _digest(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _check(path: Path, sha256: str | None) -> None:
    digest = _digest(path)
    if sha256 is not None and digest != sha256.lower():
        raise ConfigError(f"{str(path)!r} has the SHA-256 {digest}, not {sha256}; delete it and fetch it again")
    groups = Counter(group_of(question.category) for question in read_questions(path))
    if dict(groups) != _GROUPS:
        raise ConfigError(
            f"{str(path)!r} is not Spec-Bench's file: it has {dict(sorted(groups.items()))}, and 80 questions are "
            f"wanted of each of {', '.join(_GROUPS)}; delete it and fetch it again"
        )
