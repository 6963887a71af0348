"""Metrics: what a run's answers say, per group of questions and overall.

Times are medians over the repeats of a question; intervals are 95 % percentile bootstraps over questions, seeded. A
ratio of two systems uses the questions that both answered. Tokens are counted alike for all: those that came out, an
end-of-sequence token included, never more than the budget.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.bench.plan import BASELINE
from specdec.bench.questions import QuestionId, group_of
from specdec.bench.records import Record, repeats_of

__all__ = ["DEPTH", "OVERALL", "Interval", "Metrics", "Row", "bootstrap", "measure", "ratio_interval", "repeat_share"]

OVERALL = "overall"
DEPTH = 8
"""How deep acceptance is reported: CTAR(1..8)."""
RIVAL = "transformers"
_SAMPLES = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(slots=True, kw_only=True)
class Row:
    """One system on one group of questions.

    Attributes:
        answered, failed: (question, repeat) pairs.
        tokens, steps: of the first repeat.
        tokens_per_step: also called compression ratio, MAT or mean accepted tokens.
        ctar: share of steps that accept at least w draft tokens, w = 1..8.
        acceptance: share of steps that accept a token at position w of those that accepted one at w - 1.
        histogram: tokens of a step -> steps.
        rows_per_step: None where the system does not tell.
        tokens_per_second: by wall clock, prefill included; ``decode_tokens_per_second``: without it.
        speedup, decode_speedup: by plain decoding of the same engine; ``speedup_rival``: by transformers' greedy.
        shares: of the wall clock: prefill, draft, target, verify, host.
        step_seconds: mean time of a decoding step.
        peak_memory: bytes, largest of all answers.
        repeats: share of tokens inside an 8-token n-gram that the output had before; loops flatter all that copies.
        spec_bench: Spec-Bench's own figures: mean of per-question speeds, the baseline's tokens counted by tokenizing
            its text again, less one.
    """

    answered: int = 0
    failed: int = 0
    tokens: int = 0
    steps: int = 0
    tokens_per_step: Interval | None = None
    ctar: list[float] = field(default_factory=list)
    acceptance: list[float | None] = field(default_factory=list)
    histogram: dict[int, int] = field(default_factory=dict)
    rows_per_step: float | None = None
    tokens_per_second: Interval | None = None
    decode_tokens_per_second: float | None = None
    speedup: Interval | None = None
    decode_speedup: Interval | None = None
    speedup_rival: Interval | None = None
    shares: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    peak_memory: int | None = None
    repeats: float | None = None
    spec_bench: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metrics:
    """``rows[system][group]``; the group ``overall`` holds all questions."""

    groups: list[str]
    rows: dict[str, dict[str, Row]]

    def to_json(self) -> dict[str, Any]:
        return {
            "groups": self.groups,
            "systems": {
                system: {group: asdict(row) for group, row in groups.items()} for system, groups in self.rows.items()
            },
        }


def bootstrap(count: int, seed: int = 0, samples: int = _SAMPLES) -> NDArray[np.intp]:
    """[samples, count] question numbers, drawn with replacement."""
    return np.random.default_rng(seed).integers(0, count, (samples, count))


def ratio_interval(top: Sequence[float], bottom: Sequence[float], seed: int = 0) -> Interval | None:
    """Sum of ``top`` by sum of ``bottom`` over questions; None without questions or with nothing below."""
    a, b = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    if not len(a) or b.sum() == 0:
        return None
    return _interval(a.sum() / b.sum(), *((x[bootstrap(len(a), seed)]).sum(1) for x in (a, b)))


def speedup_interval(
    mine: tuple[Sequence[float], Sequence[float]], base: tuple[Sequence[float], Sequence[float]], seed: int = 0
) -> Interval | None:
    """Speed by speed, each (tokens, seconds) over the same questions, which are resampled together."""
    (t1, s1), (t0, s0) = ((np.asarray(t, dtype=np.float64), np.asarray(s, dtype=np.float64)) for t, s in (mine, base))
    if not len(t1) or not (s1.sum() and t0.sum() and s0.sum()):
        return None
    draw = bootstrap(len(t1), seed)
    value = t1.sum() / s1.sum() / (t0.sum() / s0.sum())
    return _interval(value, t1[draw].sum(1) * s0[draw].sum(1), s1[draw].sum(1) * t0[draw].sum(1))


def _interval(value: Any, top: Floats, bottom: Floats) -> Interval:
    low, high = np.percentile(top[bottom > 0] / bottom[bottom > 0], [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def measure(records: Sequence[Record], systems: Sequence[str], rival: str = RIVAL) -> Metrics:
    """Metrics of all systems, by group and overall."""
    answers = repeats_of(records)
    groups = list(dict.fromkeys(group_of(record.category) for record in records))
    rows: dict[str, dict[str, Row]] = {}
    for system in systems:
        rows[system] = {}
        for group in [*groups, OVERALL]:
            ids = dict.fromkeys(r.question_id for r in records if group in (OVERALL, group_of(r.category)))
            failed = sum(r.system == system and r.question_id in ids and r.error is not None for r in records)
            rows[system][group] = _row(answers, system, list(ids), rival, failed)
    return Metrics(groups, rows)


Answers = Mapping[tuple[str, QuestionId], Sequence[Record]]


def _row(answers: Answers, system: str, ids: Sequence[QuestionId], rival: str, failed: int) -> Row:
    mine = [answers[system, q] for q in ids if (system, q) in answers]
    row = Row(answered=sum(map(len, mine)), failed=failed)
    if not mine:
        return row
    first = [repeats[0] for repeats in mine]
    _count_steps(row, first)
    wall = [_median(repeats, "wall") for repeats in mine]
    decode = [_median(repeats, "wall") - _median(repeats, "prefill") for repeats in mine]
    row.tokens_per_second = ratio_interval([record.tokens for record in first], wall)
    row.decode_tokens_per_second = row.tokens / sum(decode) if sum(decode) > 0 else None
    row.step_seconds = sum(decode) / row.steps if row.steps else None
    row.speedup = _speedup(answers, system, BASELINE, ids, prefill=True)
    row.decode_speedup = _speedup(answers, system, BASELINE, ids, prefill=False)
    row.speedup_rival = _speedup(answers, system, rival, ids, prefill=True)
    row.shares = _shares([record for repeats in mine for record in repeats])
    memory = [turn.peak_memory for repeats in mine for r in repeats for turn in r.turns if turn.peak_memory is not None]
    row.peak_memory = max(memory, default=None)
    row.spec_bench = _spec_bench(answers, system, ids, row)
    return row


def _count_steps(row: Row, first: Sequence[Record]) -> None:
    turns = [turn for record in first for turn in record.turns]
    lengths = [length for turn in turns for length in turn.accept_lengths]
    row.tokens, row.steps = sum(len(turn.token_ids) for turn in turns), len(lengths)
    row.tokens_per_step = ratio_interval([record.tokens for record in first], [record.steps for record in first])
    if lengths:
        row.ctar = [sum(length > w for length in lengths) / len(lengths) for w in range(1, DEPTH + 1)]
        reached = [1.0, *row.ctar]
        row.acceptance = [b / a if a else None for a, b in zip(reached, row.ctar, strict=False)]
        row.histogram = {n: lengths.count(n) for n in sorted(set(lengths))}
    rows = [count for turn in turns for count in turn.rows]
    row.rows_per_step = sum(rows) / len(rows) if rows else None
    row.repeats = sum(repeat_share(t.token_ids) * len(t.token_ids) for t in turns) / max(row.tokens, 1)


def _median(repeats: Sequence[Record], phase: str) -> float:
    return statistics.median(record.seconds(phase) for record in repeats)


def _speedup(answers: Answers, system: str, base: str, ids: Sequence[QuestionId], *, prefill: bool) -> Interval | None:
    both = [q for q in ids if (system, q) in answers and (base, q) in answers]

    def speed(name: str) -> tuple[list[float], list[float]]:
        seconds = [_median(answers[name, q], "wall") for q in both]
        if not prefill:
            seconds = [s - _median(answers[name, q], "prefill") for s, q in zip(seconds, both, strict=True)]
        return [float(answers[name, q][0].tokens) for q in both], seconds

    return speedup_interval(speed(system), speed(base))


def _shares(records: Sequence[Record]) -> dict[str, float]:
    """Parts of the wall clock. ``host`` is the rest: commits, set-up and the loop itself."""
    wall = sum(record.seconds("wall") for record in records)
    if not wall:
        return {}
    known = {"prefill": sum(record.seconds("prefill") for record in records) / wall}
    if any("target" in turn.seconds for record in records for turn in record.turns):
        for phase in ("draft", "target", "verify"):
            known[phase] = sum(record.seconds(phase) for record in records) / wall
        known["host"] = max(0.0, 1 - sum(known.values()))
    return known


def _spec_bench(answers: Answers, system: str, ids: Sequence[QuestionId], row: Row) -> dict[str, float]:
    """As Spec-Bench's ``speed.py`` counts: one run's times, and the baseline's tokens from its text."""

    def speed(record: Record, tokens: int) -> float:
        return tokens / record.seconds("wall")

    mine = [speed(answers[system, q][0], answers[system, q][0].tokens) for q in ids if (system, q) in answers]
    plain = [answers[BASELINE, q][0] for q in ids if (BASELINE, q) in answers]
    base = [speed(record, sum(turn.retokenized - 1 for turn in record.turns)) for record in plain]
    found = {"tokens_per_second": statistics.mean(mine)}
    if row.steps:
        found["mean_accepted_tokens"] = row.tokens / row.steps
    if base and statistics.mean(base) > 0:
        found["baseline_tokens_per_second"] = statistics.mean(base)
        found["speedup"] = statistics.mean(mine) / statistics.mean(base)
    return found


def repeat_share(tokens: Sequence[int], size: int = 8) -> float:
    """Share of tokens that lie inside an n-gram seen before in the same output."""
    seen: set[tuple[int, ...]] = set()
    inside = [False] * len(tokens)
    for end in range(size, len(tokens) + 1):
        gram = tuple(tokens[end - size : end])
        if gram in seen:
            inside[end - size : end] = [True] * size
        seen.add(gram)
    return sum(inside) / max(len(tokens), 1)
