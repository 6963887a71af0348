"""Records: answers as they are kept on disk, one JSON line for each (question, system, repeat)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any

from filelock import FileLock, Timeout

from specdec.bench.questions import QuestionId
from specdec.errors import ConfigError, shown
from specdec.files import drop_unfinished, parse_json, whole_lines, write_json

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
            tell), and the phases ``draft``, ``target``, ``verify``, ``other`` where they are known. Of several answers
            at once each has its share of the clock, so that the shares add up.
        times: when each step's tokens were there, in seconds since the prompt was taken; empty where the system does
            not tell.
        reused: tokens of the prompt that were not run, as the turn before had been; see `keep_prefix` of a plan.
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
    reused: int = 0
    pieces: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


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
    def of(cls, values: Any) -> Record:
        """A record from its JSON.

        Raises:
            ValueError: it is none; the message says what is wrong.
        """
        about = _fields(cls, values)
        return cls(**{**about, "turns": [Turn(**_fields(Turn, turn)) for turn in about["turns"]]})


def _numbers(value: Any, kind: type) -> bool:
    return type(value) is list and set(map(type, value)) <= {kind}


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


# Fast, as a run has a million tokens: type of a field -> whether a value is of it.
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int,
    "str": lambda value: type(value) is str,
    "float": lambda value: type(value) in (int, float),
    "int | None": lambda value: value is None or type(value) is int,
    "str | None": lambda value: value is None or type(value) is str,
    "QuestionId": lambda value: type(value) in (int, str),
    "list[int]": lambda value: _numbers(value, int),
    "list[str]": lambda value: _numbers(value, str),
    "list[float]": lambda value: type(value) is list and all(map(_is_seconds, value)),
    "list[Turn]": lambda value: _numbers(value, dict),
    "dict[str, float]": lambda value: type(value) is dict and all(map(_is_seconds, value.values())) and "wall" in value,
}


def _fields(kind: type[Record] | type[Turn], values: Any) -> dict[str, Any]:
    """The values of a dataclass' fields, checked; ValueError names the first that does not fit."""
    if not isinstance(values, dict):
        raise ValueError(f"it holds {shown(values)}, not an object")
    known = {one.name: one for one in fields(kind)}
    strange = sorted(values.keys() - known.keys())
    if strange:
        raise ValueError(f"{shown(strange[0])} is no part of it")
    for name, one in known.items():
        if name not in values and one.default is one.default_factory is MISSING:
            raise ValueError(f"it has no {name}")
        if name in values and not _FITS[str(one.type)](values[name]):
            raise ValueError(f"{name} is {shown(values[name])}, which is no {one.type}")
    return values


class RunFolder:
    """A run's folder: ``manifest.json`` and the append-only ``answers.jsonl``.

    Every line is flushed to the disk before the next answer starts. A line that a kill cut short is dropped when the
    folder is opened for writing again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.answers, self.manifest_path = self.path / "answers.jsonl", self.path / "manifest.json"

    def check(self) -> None:
        """Raises ConfigError where no folder can be there; makes none."""
        there = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            why = "cannot be written to" if there.is_dir() else "is a file"
            raise ConfigError(f"cannot write a run to {str(self.path)!r}: {str(there)!r} {why}; give another --out")

    def manifest(self) -> dict[str, Any]:
        """What the run is.

        Raises:
            ConfigError: the folder holds no run.
        """
        try:
            values = parse_json(self.manifest_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{str(self.path)!r} holds no run: {error}; give the --out folder of a `specdec bench`"
            ) from error
        cost = {"cost": _COST} if isinstance(values, dict) and values.get("cost") else {}
        wrong = _misfit(values, {**_MANIFEST, **cost}, "it")
        if wrong is not None:
            raise ConfigError(
                f"{str(self.manifest_path)!r} is no manifest of a run: {wrong}; give the --out folder of one, or a new "
                "folder where it was broken or made by another version of specdec"
            )
        found: dict[str, Any] = values
        return found

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace the manifest.

        Raises:
            ConfigError: the disk refuses.
        """
        with self.on_disk("the manifest"):
            write_json(self.manifest_path, manifest)

    @contextmanager
    def on_disk(self, what: str) -> Iterator[None]:
        """Turns what a disk can do to a write into an error that says so."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write {what} in {str(self.path)!r}: {error}; the answers so far are whole. Make room, or give "
                f"another folder, and with --out {str(self.path)!r} the same command goes on"
            ) from error

    def records(self) -> list[Record]:
        """All whole records; the last one of a key counts.

        Raises:
            ConfigError: the file cannot be read, or has a broken line that is not the last.
        """
        found: dict[Key, Record] = {}
        try:
            lines = whole_lines(self.answers)
        except OSError as error:
            raise ConfigError(f"cannot read {str(self.answers)!r}: {error}; give another --out") from error
        for number, line in enumerate(lines, 1):
            try:
                record = Record.of(parse_json(line))
            except ValueError as error:
                raise ConfigError(
                    f"{str(self.answers)!r}, line {number}: no answer record: {error}; delete the line, and the run "
                    "answers that question again, or choose another --out where another version of specdec wrote it"
                ) from error
            found[record.key] = record
        return list(found.values())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder, and drop a line that was not finished: two runs in one would mix their lines. The system
        lets go of it when the process dies.

        Raises:
            ConfigError: another process holds it, or it is no folder that can be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock").acquire(timeout=0)
        except Timeout as error:  # which is an OSError
            raise ConfigError(
                f"another run is writing to {str(self.path)!r}; wait for it, stop it, or choose another --out"
            ) from error
        except (OSError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"cannot write to {str(self.path)!r}: {error}; give another --out") from error
        with lock:
            with self.on_disk("the answers"):
                drop_unfinished(self.answers)
            yield

    def append(self, *records: Record) -> None:
        """Add records for good.

        Raises:
            ConfigError: the disk refuses; a line that it took half of is dropped when the run goes on.
        """
        lines = [json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")) for record in records]
        with self.on_disk("an answer"), self.answers.open("ab") as file:
            file.write("".join(line + "\n" for line in lines).encode("utf-8", "replace"))
            file.flush()
            os.fsync(file.fileno())


# What other code takes for granted of a manifest: a type, or what a mapping (with ``...``: any key) or list holds.
_MANIFEST: Mapping[Any, Any] = {
    "plan": {"temperature": float, "max_new_tokens": int, "repeats": int, "model": str},
    "questions": {"file": str, "sha256": str, "asked": int},
    "model": {"name": str, "dtype": str, "fingerprint": str},
    "systems": {...: {"ours": bool, "lossy": bool, "comparable": bool, "options": dict}},
    "left_out": {...: str},
    "environment": {
        "commit": (str, NoneType),
        "uncommitted_changes": bool,
        "versions": {"torch": str, "transformers": str},
        "device": str,
        "cuda": (str, NoneType),
        "cpu": str,
        "threads": int,
    },
    "runs": [{"command": str}],
}
_COST = {"context": int, "seconds": {...: float}}


def _misfit(value: Any, shape: Any, name: str) -> str | None:
    """What of a value is not as ``shape`` says, in words; None where all is."""
    if isinstance(shape, Mapping):
        if not isinstance(value, dict):
            return f"{name} is {shown(value)}, which is no mapping"
        every = shape.get(...)
        parts = shape if every is None else dict.fromkeys(value, every)
        missing = [key for key in parts if key not in value]
        if missing:
            return f"{name} has no {missing[0]!r}"
        return next(filter(None, (_misfit(value[key], part, shown(key)) for key, part in parts.items())), None)
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return f"{name} is {shown(value)}, which is no list"
        return next(filter(None, (_misfit(one, shape[0], name) for one in value)), None)
    kinds = (float, int) if shape is float else shape
    if not isinstance(value, kinds) or (isinstance(value, bool) and shape is not bool):
        return f"{name} is {shown(value)}, of type {type(value).__name__}"
    return None


def repeats_of(records: Sequence[Record]) -> dict[tuple[str, QuestionId], list[Record]]:
    """(system, question) -> its answers that did not fail, by repeat."""
    found: dict[tuple[str, QuestionId], list[Record]] = {}
    for record in sorted(records, key=lambda r: r.repeat):
        if record.error is None:
            found.setdefault((record.system, record.question_id), []).append(record)
    return found
