"""Download: Spec-Bench's question file, with a checksum."""

from __future__ import annotations

from collections import Counter
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from specdec.engine.questions import group_of, read_questions, spec_bench_path
from specdec.errors import ConfigError
from specdec.settings.files import digest_of, replacing, write_text

__all__ = ["SPEC_BENCH_URL", "download_spec_bench"]

SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"

_GROUPS = dict.fromkeys(("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80)


def download_spec_bench(url: str = SPEC_BENCH_URL) -> tuple[Path, str]:
    """Fetch the file unless it is there; returns its path and its SHA-256.

    The authors publish no checksum. The file must have 80 questions in each of the six subtasks, and a file from an
    earlier download must still have the same hash.

    Raises:
        ConfigError: there is no network, the connection broke, or the file is not Spec-Bench's.
    """
    path = spec_bench_path()
    note = path.with_suffix(".sha256")
    if not path.is_file():
        with replacing(path) as new:
            try:
                with urlopen(url, timeout=30) as answer:
                    new.write_bytes(answer.read())
            except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError
                raise ConfigError(
                    f"cannot fetch {url}: {str(error) or type(error).__name__}; run this again, or save the file as "
                    f"{str(path)!r} on your own"
                ) from error
            _check(new, f"what {url} sent", "run this again")
        write_text(note, digest_of(path) + "\n")
    digest, remedy = digest_of(path), "delete it and fetch it again"
    if note.is_file() and digest != (fetched := note.read_text(encoding="ascii").strip()):
        raise ConfigError(f"{str(path)!r} has the SHA-256 {digest}, not {fetched} as when it was fetched; {remedy}")
    _check(path, repr(str(path)), remedy)
    return path, digest


def _check(path: Path, what: str, remedy: str) -> None:
    """Raises ConfigError where the file at ``path``, called ``what``, is not Spec-Bench's."""
    groups = Counter(group_of(question.category) for question in read_questions(path))
    if dict(groups) != _GROUPS:
        raise ConfigError(
            f"{what} is not Spec-Bench's file: it has {dict(sorted(groups.items()))}, and 80 questions are wanted of "
            f"each of {', '.join(_GROUPS)}; {remedy}"
        )
