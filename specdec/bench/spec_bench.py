"""Spec-Bench: its question file, fetched with a checksum, and answers as its own scripts read them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from specdec.bench.records import Record
from specdec.engine.questions import group_of, read_questions, spec_bench_path
from specdec.errors import ConfigError
from specdec.settings.files import digest_of, replacing, write_text

__all__ = ["SPEC_BENCH_URL", "answer_of", "download_spec_bench", "write_answers"]

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


def write_answers(records: Sequence[Record], folder: Path, model: str) -> list[Path]:
    """One file per system and repeat, ``run_1/<model>-<system>.jsonl``; questions that failed are left out.

    Returns the files, sorted.
    """
    lines: dict[Path, list[str]] = {}
    for record in sorted(records, key=lambda r: (r.repeat, str(r.system))):
        name = re.sub(r"[^\w.+-]+", "-", f"{Path(model).name}-{record.system}")
        file = folder / f"run_{record.repeat + 1}" / f"{name}.jsonl"
        if record.error is None:
            lines.setdefault(file, []).append(json.dumps(answer_of(record, name), ensure_ascii=False))
    for file, content in lines.items():
        write_text(file, "".join(line + "\n" for line in content))
    return sorted(lines)


def answer_of(record: Record, model_id: str) -> dict[str, Any]:
    """A record in Spec-Bench's format: lists over turns, and the accepted lengths of all turns in one list."""
    key = f"{record.question_id}/{record.system}/{record.repeat}/{record.time}"
    return {
        "question_id": record.question_id,
        "category": record.category,
        "answer_id": hashlib.sha256(key.encode()).hexdigest()[:22],
        "model_id": model_id,
        "choices": [
            {
                "index": 0,
                "turns": [turn.text.strip() for turn in record.turns],
                "decoding_steps": [len(turn.accept_lengths) for turn in record.turns],
                "new_tokens": [len(turn.token_ids) for turn in record.turns],
                "wall_time": [turn.seconds["wall"] for turn in record.turns],
                "accept_lengths": [length for turn in record.turns for length in turn.accept_lengths],
            }
        ],
        "tstamp": record.time,
    }
