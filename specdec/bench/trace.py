"""Trace: a text as its steps, for the report's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.bench.questions import QuestionId, group_of
from specdec.bench.records import Record, Turn

__all__ = ["Piece", "Trace", "traces"]

_SHADES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One step's text; ``shade`` 0 is a plain step, 1 to 4 alternate; ``about`` is shown on hover."""

    text: str
    shade: int
    about: str


@dataclass(frozen=True, slots=True)
class Trace:
    """One answer of one system."""

    system: str
    summary: str
    pieces: list[Piece]


def traces(records: Sequence[Record], systems: Sequence[str]) -> dict[str, list[Trace]]:
    """Title -> a trace per system, of the first question of each group."""
    chosen: dict[str, QuestionId] = {}
    for record in records:
        chosen.setdefault(group_of(record.category), record.question_id)
    found: dict[str, list[Trace]] = {}
    for group, question in chosen.items():
        answers = {r.system: r for r in records if r.question_id == question and r.repeat == 0 and r.turns}
        found[f"{group}, question {question}"] = [_trace(answers[s]) for s in systems if s in answers]
    return found


def _trace(record: Record) -> Trace:
    pieces: list[Piece] = []
    before = 0
    for number, turn in enumerate(record.turns):
        if number:
            pieces.append(Piece(f"\n--- turn {number + 1} ---\n", 0, "the next question"))
        pieces += _pieces(record.system, turn, before)
        before += len(turn.accept_lengths)
    mean = record.tokens / max(record.steps, 1)
    return Trace(record.system, f"{record.tokens} tokens in {record.steps} steps, {mean:.2f} per step", pieces)


def _pieces(system: str, turn: Turn, before: int) -> list[Piece]:
    pieces: list[Piece] = []
    coloured = 0
    for place, (text, length) in enumerate(zip(turn.pieces, turn.accept_lengths, strict=False)):
        rows = f" from {turn.rows[place]} rows" if place < len(turn.rows) else ""
        shade = 0
        if length > 1:
            shade = 1 + coloured % _SHADES
            coloured += 1
        noun = "token" if length == 1 else "tokens"
        pieces.append(Piece(text, shade, f"{system}, step {before + place + 1}: {length} {noun}{rows}"))
    return pieces
