"""Records: answers as they are kept on disk, one JSON line for each (question, system, repeat)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec.bench.questions import QuestionId
from specdec.errors import ConfigError
from specdec.files import drop_unfinished, whole_lines, write_json

__all__ = ["Key", "Record", "RunFolder", "Turn", "repeats_of"]

Key = tuple[QuestionId, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answer.

    Attributes:
        prompt_ids, token_ids: what went in and came out; an end-of-sequence token is included.
        text: of ``token_ids``, without special tokens.
        finish_reason: as in Generation; ``""`` where the system does not tell.
        accept_lengths: tokens of each step, the bonus token counted.
        rows: rows of each target forward; empty where the system does not tell.
        seconds: ``wall`` (all of it), ``prefill`` (up to the first step, or to the first token for systems that do not
            tell), and the phases ``draft``, ``target``, ``verify``, ``other`` where they are known.
        retokenized: tokens that the tokenizer makes of ``text``; Spec-Bench counts the baseline's so.
        peak_memory: bytes of a GPU's memory; None elsewhere.
        pieces: text of each step, for the trace; kept for the first repeat only.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    accept_lengths: list[int]
    rows: list[int]
    seconds: dict[str, float]
    retokenized: int
    peak_memory: int | None = None
    pieces: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All turns of one question by one system; ``error`` where one failed, and then no turns."""

    question_id: QuestionId
    category: str
    system: str
    repeat: int
    turns: list[Turn]
    error: str | None = None
    time: float = 0.0

    @property
    def key(self) -> Key:
        return self.question_id, self.system, self.repeat

    @property
    def tokens(self) -> int:
        """New tokens of all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def steps(self) -> int:
        """Decoding steps of all turns."""
        return sum(len(turn.accept_lengths) for turn in self.turns)

    def seconds(self, phase: str) -> float:
        """Of all turns."""
        return sum(turn.seconds.get(phase, 0.0) for turn in self.turns)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Record:
        return cls(**{**values, "turns": [Turn(**turn) for turn in values["turns"]]})


class RunFolder:
    """A run's folder: ``manifest.json`` and the append-only ``answers.jsonl``.

    Every line is flushed to the disk before the next answer starts. A line that a kill cut short is dropped when the
    folder is opened for writing again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.answers, self.manifest_path = self.path / "answers.jsonl", self.path / "manifest.json"

    def manifest(self) -> dict[str, Any]:
        """What the run is.

        Raises:
            ConfigError: the folder holds no run.
        """
        try:
            values = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{str(self.path)!r} holds no run: {error}; give the --out folder of a `specdec bench`"
            ) from error
        if not isinstance(values, dict) or "plan" not in values:
            raise ConfigError(f"{str(self.manifest_path)!r} is no manifest of a run; give the --out folder of one")
        return values

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.manifest_path, manifest)

    def records(self) -> list[Record]:
        """All whole records; the last one of a key counts.

        Raises:
            ConfigError: a broken line that is not the last.
        """
        found: dict[Key, Record] = {}
        for number, line in enumerate(whole_lines(self.answers), 1):
            try:
                record = Record.of(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{str(self.answers)!r}, line {number}: no answer record: {error}; delete the line, and the run "
                    "answers that question again"
                ) from error
            found[record.key] = record
        return list(found.values())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder, and drop a line that was not finished: two runs in one would mix their lines. The system
        lets go of it when the process dies.

        Raises:
            ConfigError: another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.path / ".lock").acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(
                f"another run is writing to {str(self.path)!r}; wait for it, stop it, or choose another --out"
            ) from error
        with lock:
            drop_unfinished(self.answers)
            yield

    def append(self, record: Record) -> None:
        """Add a record for good."""
        line = json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        with self.answers.open("ab") as file:
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())


def repeats_of(records: Sequence[Record]) -> dict[tuple[str, QuestionId], list[Record]]:
    """(system, question) -> its answers that did not fail, by repeat."""
    found: dict[tuple[str, QuestionId], list[Record]] = {}
    for record in sorted(records, key=lambda r: r.repeat):
        if record.error is None:
            found.setdefault((record.system, record.question_id), []).append(record)
    return found
