"""Records: answers on disk, one JSON line for each (question, system, repeat)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Lt, MaxLen, MinLen, Predicate

from specdec.engine.questions import QuestionId
from specdec.errors import ConfigError
from specdec.settings.files import (
    append_lines,
    check_place,
    drop_unfinished,
    held_folder,
    read_lines,
    write_json,
    writing,
)
from specdec.settings.validation import read_json

__all__ = ["AnsweredTurn", "Key", "Output", "Record", "RunFolder", "repeats_of"]

Key = tuple[QuestionId, str, int]
Seconds = Annotated[float, Ge(0), Lt(1e9)]


@dataclass(frozen=True, slots=True)
class Output:
    """A system's answer to a prompt.

    Attributes:
        token_ids: the new tokens; an end-of-sequence token is included.
        accept_lengths: tokens of each step, the bonus token included.
        rows: rows of each target forward; empty where the system does not report them.
        seconds: ``wall`` for everything, ``prefill`` up to the first step (for systems that do not report steps: up to
            the first token), and the phases ``draft``, ``target``, ``verify``, ``other`` where they are known. Of
            several answers at once, each has its share of the clock, so that the shares add up to it.
        finish_reason: as in Generation; ``""`` where the system does not report it.
        reused: tokens of the prompt that the turn before had run already; see `keep_prefix` of a plan.
        times: when each step's tokens were there, in seconds since the prompt was taken; empty where the system does
            not report it.
    """

    token_ids: list[int]
    accept_lengths: list[int]
    rows: list[int] = field(default_factory=list)
    seconds: dict[str, Seconds] = field(default_factory=dict)
    finish_reason: str = ""
    reused: int = 0
    times: list[Seconds] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTurn(Output):
    """An answer as it is stored.

    Attributes:
        prompt_ids: the prompt's tokens.
        text: text of ``token_ids``, without special tokens.
        retokenized: number of tokens that the tokenizer makes of ``text``; Spec-Bench counts the baseline's tokens so.
        peak_memory: bytes of a GPU's memory; None on other devices.
        pieces: text of each step, for the trace; stored for the first repeat only.
    """

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}

    prompt_ids: list[int]
    text: str
    retokenized: int
    seconds: Annotated[dict[str, Seconds], Predicate(lambda seconds: "wall" in seconds)]
    peak_memory: int | None = None
    pieces: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """All turns of one question by one system; where one failed, ``error`` and no turns."""

    __pydantic_config__: ClassVar = {"strict": True, "extra": "forbid"}

    question_id: QuestionId
    category: str
    system: str
    repeat: int
    turns: list[AnsweredTurn]
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
        """The seconds of a phase in all turns."""
        return sum(turn.seconds.get(phase, 0.0) for turn in self.turns)


class RunFolder:
    """A run's folder: ``manifest.json`` and the append-only ``answers.jsonl``.

    Every line is flushed to the disk before the next answer starts. A line that a kill cut short is dropped when the
    folder is opened for writing again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.answers, self.manifest_path = self.path / "answers.jsonl", self.path / "manifest.json"

    def check(self) -> None:
        """Raises ConfigError where the folder cannot exist; creates nothing."""
        check_place(self.path, "a run", folder=True)

    def manifest(self) -> dict[str, Any]:
        """The manifest of the run.

        Raises:
            ConfigError: the folder has no run.
        """
        try:
            text = self.manifest_path.read_text(encoding="utf-8")
            read_json(_MANIFEST, text)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{str(self.path)!r} holds no run, as manifest.json says: {error}; give the --out folder of a `specdec "
                "bench`, or a new folder where it was broken or made by another version of specdec"
            ) from error
        manifest: dict[str, Any] = json.loads(text)
        return manifest

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace the manifest.

        Raises:
            ConfigError: the disk cannot be written to.
        """
        with self.on_disk("the manifest"):
            write_json(self.manifest_path, manifest)

    def on_disk(self, what: str) -> AbstractContextManager[None]:
        """A context that turns errors of the disk into a ConfigError; ``what`` names the file."""
        remedy = (
            "the answers so far are whole. Make room, or give another folder, and with --out "
            f"{str(self.path)!r} the same command goes on"
        )
        return writing(f"{what} in", self.path, remedy, ConfigError)

    def records(self) -> list[Record]:
        """All complete records; of several with one key, the last counts.

        Raises:
            ConfigError: the file cannot be read, or has a broken line that is not the last.
        """
        remedy = (
            "delete the line, and the run answers that question again, or choose another --out where another version "
            "of specdec wrote it"
        )
        lines = read_lines(self.answers, lambda _, line: read_json(Record, line), "answer record", remedy)
        return list({record.key: record for record in lines}.values())

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder and drop an unfinished line: two runs in one folder would mix their lines. The system
        releases the lock when the process dies.

        Raises:
            ConfigError: another process has the lock, or the folder is not writable.
        """
        with held_folder(self.path):
            with self.on_disk("the answers"):
                drop_unfinished(self.answers)
            yield

    def append(self, *records: Record) -> None:
        """Append records, flushed to the disk.

        Raises:
            ConfigError: the disk cannot be written to; a line that is half written is dropped when the run continues.
        """
        with self.on_disk("an answer"):
            append_lines(self.answers, *map(asdict, records))


def _object(optional: Mapping[str, Any] | None = None, /, **parts: Any) -> Any:
    """The type of a JSON object that has at least these fields."""
    fields: list[Any] = [*parts.items(), *((name, kind, None) for name, kind in (optional or {}).items())]
    return make_dataclass("Object", fields, namespace={"__pydantic_config__": {"strict": True, "extra": "ignore"}})


def _each(kind: Any) -> Any:
    """The type of a JSON object whose values all have one type, under any names."""
    return dict[str, kind]


# The fields of a manifest that other code relies on.
_MANIFEST = _object(
    {"cost": Annotated[dict[str, Any], MaxLen(0)] | _object(context=int, seconds=dict[str, float])},
    plan=_object(temperature=float, max_new_tokens=int, repeats=int, model=str),
    questions=_object(file=str, sha256=str, asked=int),
    model=_object(name=str, dtype=str, fingerprint=str),
    systems=_each(_object(ours=bool, lossy=bool, comparable=bool, options=dict[str, Any])),
    left_out=dict[str, str],
    environment=_object(
        commit=str | None,
        uncommitted_changes=bool,
        versions=_object(torch=str, transformers=str),
        device=str,
        cuda=str | None,
        cpu=str,
        threads=int,
    ),
    runs=Annotated[list[_object(command=str)], MinLen(1)],  # type: ignore[misc]
)


def repeats_of(records: Sequence[Record]) -> dict[tuple[str, QuestionId], list[Record]]:
    """(system, question) -> its answers without errors, by repeat."""
    answers: dict[tuple[str, QuestionId], list[Record]] = {}
    for record in sorted(records, key=lambda r: r.repeat):
        if record.error is None:
            answers.setdefault((record.system, record.question_id), []).append(record)
    return answers
