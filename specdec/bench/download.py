"""Download: Spec-Bench's question file, with a checksum."""

from __future__ import annotations

import shutil
from collections import Counter
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specdec.bench.questions import group_of, read_questions, spec_bench_path
from specdec.errors import ConfigError
from specdec.files import digest_of, write_text

__all__ = ["SPEC_BENCH_URL", "download_spec_bench"]

SPEC_BENCH_URL = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"

_GROUPS = dict.fromkeys(("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80)


def download_spec_bench(url: str = SPEC_BENCH_URL, timeout: float = 30.0) -> tuple[Path, str]:
    """Fetch the file unless it is there; returns its path and its SHA-256.

    The authors publish no checksum. The file must hold 80 questions in each of the six subtasks, and one that was
    fetched earlier must still be the one that was fetched.

    Raises:
        ConfigError: no network, a connection that broke, or a file that is not Spec-Bench's.
    """
    path = spec_bench_path()
    note = path.with_suffix(".sha256")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        part = path.with_suffix(".part.jsonl")
        try:
            _fetch(url, part, timeout)
        except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError
            raise ConfigError(
                f"cannot fetch {url}: {str(error) or type(error).__name__}; run this again, and it goes on where it "
                f"stopped, or save the file as {str(path)!r} on your own"
            ) from error
        try:
            _check(part, f"what {url} sent", "run this again")
        except ConfigError:
            part.unlink()  # or every later try would go on with it
            raise
        part.replace(path)
        write_text(note, digest_of(path) + "\n")
    digest, remedy = digest_of(path), "delete it and fetch it again"
    if note.is_file() and digest != (fetched := note.read_text(encoding="ascii").strip()):
        raise ConfigError(f"{str(path)!r} has the SHA-256 {digest}, not {fetched} as when it was fetched; {remedy}")
    _check(path, repr(str(path)), remedy)
    return path, digest


def _fetch(url: str, part: Path, timeout: float) -> None:
    """Write a URL's content to ``part``; where an earlier try left some of it, ask for the rest alone.

    Raises:
        OSError, HTTPException: no answer, or one that ends early.
    """
    start = part.stat().st_size if part.is_file() else 0
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urlopen(request, timeout=timeout) as answer:
            resumed = answer.status == HTTPStatus.PARTIAL_CONTENT
            with part.open("ab" if resumed else "wb") as file:
                shutil.copyfileobj(answer, file)
            announced = answer.headers.get("Content-Length")
    except HTTPError as error:
        if start and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # the part is no beginning of the file
            part.unlink()
            return _fetch(url, part, timeout)
        raise
    got = part.stat().st_size - (start if resumed else 0)
    if announced is not None and got < int(announced):
        raise ConnectionError(f"the connection ended after {got} of {announced} bytes")


def _check(path: Path, what: str, remedy: str) -> None:
    """Raises ConfigError where the file at ``path``, called ``what``, is not Spec-Bench's."""
    groups = Counter(group_of(question.category) for question in read_questions(path))
    if dict(groups) != _GROUPS:
        raise ConfigError(
            f"{what} is not Spec-Bench's file: it has {dict(sorted(groups.items()))}, and 80 questions are wanted of "
            f"each of {', '.join(_GROUPS)}; {remedy}"
        )
