"""Metrics of a run's answers, per group of questions and overall.

Times are medians over the repeats of a question; intervals are seeded 95 % percentile bootstraps over questions. A
ratio of two systems uses the questions that both answered. Tokens are counted in the same way for all systems: the
emitted tokens with an end-of-sequence token, at most the budget.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from specdec.bench.plan import BASELINE, at_once, with_batch
from specdec.bench.records import AnsweredTurn, Record, repeats_of
from specdec.engine.questions import QuestionId, group_of

__all__ = [
    "DEPTH",
    "OVERALL",
    "Answers",
    "Interval",
    "Metrics",
    "Row",
    "Sums",
    "measure",
    "ratio_interval",
    "repeat_share",
    "speed_of",
    "speedup_of",
]

OVERALL = "overall"
DEPTH = 8
"""The depths of acceptance to report: CTAR(1..8)."""
RIVAL = "transformers"
_SAMPLES = 2000


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
        tokens, steps: numbers in the first repeat.
        tokens_per_step: also called compression ratio, MAT or mean accepted tokens.
        ctar: share of steps that accept at least w draft tokens, w = 1..8.
        acceptance: share of steps that accept a token at position w of those that accepted one at w - 1.
        histogram: tokens of a step -> steps.
        rows_per_step: mean rows of a step; None where the system does not report them.
        tokens_per_second: by wall clock with the prefill; ``decode_tokens_per_second``: without the prefill.
        prefill_tokens_per_second: of the prompts' tokens that were run.
        speedup, decode_speedup: relative to plain decoding of the same engine, one question at a time;
            ``speedup_rival``: relative to transformers' greedy decoding of as many questions at once.
        shares: shares of the wall clock: prefill, draft, target, rest.
        step_seconds: mean time of a decoding step.
        rest_seconds: the part of it that is neither drafting nor the target's forward: verification, commits and the
            loop, a batch's too. (On a GPU this includes waiting for the device.) The begin of a request is part of the
            prefill, as in :class:`specdec.results.Seconds`.
        first_seconds, between_seconds: median and 95th percentile of the time to a turn's first token, measured from
            when its prompt was taken, and of the time between two tokens; a step's tokens share the time since the step
            before.
        peak_memory: bytes of a GPU, the largest of all answers.
        repeats: share of tokens inside an 8-token n-gram that the output had before; loops favour drafters that copy.
        spec_bench: Spec-Bench's own figures: the mean of per-question speeds, where the baseline's tokens are counted
            by tokenizing its text again, less one.
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
    prefill_tokens_per_second: float | None = None
    speedup: Interval | None = None
    decode_speedup: Interval | None = None
    speedup_rival: Interval | None = None
    shares: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    rest_seconds: float | None = None
    first_seconds: list[float] = field(default_factory=list)
    between_seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    repeats: float | None = None
    spec_bench: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Metrics:
    """``rows[system][group]``; the group ``overall`` has all questions."""

    groups: list[str]
    rows: dict[str, dict[str, Row]]

    def one_by_one(self) -> Metrics:
        """The figures of the systems that answer one question at a time."""
        return Metrics(self.groups, {label: rows for label, rows in self.rows.items() if at_once(label)[1] == 1})


def ratio_interval(
    tops: Sequence[Sequence[float]], bottoms: Sequence[Sequence[float]], level: float = 95.0
) -> Interval | None:
    """The product of the sums of ``tops``, divided by that of ``bottoms``; each list has a figure per question.

    All lists draw the same questions together. ``level`` is the interval's, in percent. The result is None without
    questions, or where a sum in ``bottoms`` is 0.
    """
    above, below = (np.asarray(lists, dtype=np.float64) for lists in (tops, bottoms))  # [lists, questions]
    if not above.size or not below.sum(1).all():
        return None
    draw = np.random.default_rng(0).integers(0, above.shape[1], (_SAMPLES, above.shape[1]))
    # In order of their size, so that a run beside itself is 1 and not 1 up to rounding.
    top, bottom = (np.sort(values[:, draw].sum(2), 0).prod(0) for values in (above, below))  # [samples]
    low, high = np.percentile(top[bottom > 0] / bottom[bottom > 0], [50 - level / 2, 50 + level / 2])
    return Interval(float(above.sum(1).prod() / below.sum(1).prod()), float(low), float(high))


def speed_of(answers: Sequence[Sequence[Record]], *, prefill: bool = True) -> tuple[list[float], list[float]]:
    """By question: the tokens of the first repeat, and the median seconds of all repeats; ``prefill`` includes it."""
    seconds = [_median(repeats, "wall") - (0.0 if prefill else _median(repeats, "prefill")) for repeats in answers]
    return [float(repeats[0].tokens) for repeats in answers], seconds


def measure(records: Sequence[Record], systems: Sequence[str], rival: str = RIVAL) -> Metrics:
    """Metrics of all systems, by group and overall."""
    answers = repeats_of(records)
    groups = list(dict.fromkeys(group_of(record.category) for record in records))
    rows: dict[str, dict[str, Row]] = {}
    for system in systems:
        rows[system], peer = {}, with_batch(rival, at_once(system)[1])
        for group in [*groups, OVERALL]:
            ids = dict.fromkeys(r.question_id for r in records if group in (OVERALL, group_of(r.category)))
            failed = sum(r.system == system and r.question_id in ids and r.error is not None for r in records)
            rows[system][group] = _row(answers, system, list(ids), peer, failed)
    return Metrics(groups, rows)


Answers = Mapping[tuple[str, QuestionId], Sequence[Record]]
Sums = list[list[float]]


def _row(answers: Answers, system: str, ids: Sequence[QuestionId], rival: str, failed: int) -> Row:
    mine = [answers[system, q] for q in ids if (system, q) in answers]
    row = Row(answered=sum(map(len, mine)), failed=failed)
    if not mine:
        return row
    _count_steps(row, [repeats[0] for repeats in mine])
    tokens, wall = speed_of(mine)
    decode = sum(speed_of(mine, prefill=False)[1])
    row.tokens_per_second = ratio_interval([tokens], [wall])
    row.decode_tokens_per_second = row.tokens / decode if decode > 0 else None
    prompts = sum(len(turn.prompt_ids) - turn.reused for repeats in mine for turn in repeats[0].turns)
    prefill = sum(_median(repeats, "prefill") for repeats in mine)
    row.prefill_tokens_per_second = prompts / prefill if prefill > 0 else None
    row.step_seconds = decode / row.steps if row.steps else None
    if row.steps and any("target" in turn.seconds for turn in mine[0][0].turns):
        known = sum(_median(repeats, phase) for repeats in mine for phase in ("target", "draft"))
        row.rest_seconds = (decode - known) / row.steps
    _time_tokens(row, [turn for repeats in mine for record in repeats for turn in record.turns if turn.times])
    row.speedup = ratio_interval(*speedup_of(answers, system, BASELINE, ids))
    row.decode_speedup = ratio_interval(*speedup_of(answers, system, BASELINE, ids, prefill=False))
    row.speedup_rival = ratio_interval(*speedup_of(answers, system, rival, ids))
    row.shares = _shares([record for repeats in mine for record in repeats])
    memory = [turn.peak_memory for repeats in mine for r in repeats for turn in r.turns if turn.peak_memory is not None]
    row.peak_memory = max(memory, default=None)
    plain = [answers[BASELINE, q][0] for q in ids if (BASELINE, q) in answers]
    row.spec_bench = _spec_bench(row, [repeats[0] for repeats in mine], plain)
    return row


def _count_steps(row: Row, first: Sequence[Record]) -> None:
    turns = [turn for record in first for turn in record.turns]
    lengths = [length for turn in turns for length in turn.accept_lengths]
    row.tokens, row.steps = sum(len(turn.token_ids) for turn in turns), len(lengths)
    row.tokens_per_step = ratio_interval([[r.tokens for r in first]], [[r.steps for r in first]])
    if lengths:
        row.ctar = [sum(length > w for length in lengths) / len(lengths) for w in range(1, DEPTH + 1)]
        reached = [1.0, *row.ctar]
        row.acceptance = [b / a if a else None for a, b in zip(reached, row.ctar, strict=False)]
        row.histogram = {n: lengths.count(n) for n in sorted(set(lengths))}
    rows = [count for turn in turns for count in turn.rows]
    row.rows_per_step = sum(rows) / len(rows) if rows else None
    row.repeats = sum(repeat_share(t.token_ids) * len(t.token_ids) for t in turns) / max(row.tokens, 1)


def _time_tokens(row: Row, turns: Sequence[AnsweredTurn]) -> None:
    first = [turn.times[0] for turn in turns]
    steps = [
        (later - before, count)
        for turn in turns
        for (before, later), count in zip(pairwise(turn.times), turn.accept_lengths[1:], strict=False)
    ]
    between = [seconds / count for seconds, count in steps for _ in range(count)]
    row.first_seconds, row.between_seconds = (
        np.percentile(seconds, [50, 95]).tolist() if seconds else [] for seconds in (first, between)
    )


def _median(repeats: Sequence[Record], phase: str) -> float:
    return statistics.median(record.seconds(phase) for record in repeats)


def speedup_of(
    answers: Answers, system: str, base: str, ids: Sequence[QuestionId], *, prefill: bool = True
) -> tuple[Sums, Sums]:
    """Figures by question: the product of the first ones' sums, by that of the others, is how much faster it is."""
    both = [q for q in ids if (system, q) in answers and (base, q) in answers]
    (mine, taken), (plain, base_taken) = (
        speed_of([answers[name, q] for q in both], prefill=prefill) for name in (system, base)
    )
    return [mine, base_taken], [taken, plain]


def _shares(records: Sequence[Record]) -> dict[str, float]:
    """Shares of the wall clock; ``rest``: verification, commits and the loop itself."""
    wall = sum(record.seconds("wall") for record in records)
    if not wall:
        return {}
    known = {"prefill": sum(record.seconds("prefill") for record in records) / wall}
    if any("target" in turn.seconds for record in records for turn in record.turns):
        for phase in ("draft", "target"):
            known[phase] = sum(record.seconds(phase) for record in records) / wall
        known["rest"] = max(0.0, 1 - sum(known.values()))
    return known


def _spec_bench(row: Row, first: Sequence[Record], plain: Sequence[Record]) -> dict[str, float]:
    """Figures counted as in Spec-Bench's ``speed.py``: one run's times, and the baseline's tokens from its text."""
    if not all(record.seconds("wall") for record in (*first, *plain)):  # the clock's resolution was too low
        return {}
    mine = statistics.mean(record.tokens / record.seconds("wall") for record in first)
    figures = {"tokens_per_second": mine}
    if row.steps:
        figures["mean_accepted_tokens"] = row.tokens / row.steps
    base = [sum(turn.retokenized - 1 for turn in record.turns) / record.seconds("wall") for record in plain]
    if base and statistics.mean(base) > 0:
        figures["baseline_tokens_per_second"] = statistics.mean(base)
        figures["speedup"] = mine / statistics.mean(base)
    return figures


def repeat_share(tokens: Sequence[int]) -> float:
    """Share of tokens that lie inside an 8-gram seen before in the same output."""
    size = 8
    seen: set[tuple[int, ...]] = set()
    inside = [False] * len(tokens)
    for end in range(size, len(tokens) + 1):
        gram = tuple(tokens[end - size : end])
        if gram in seen:
            inside[end - size : end] = [True] * size
        seen.add(gram)
    return sum(inside) / max(len(tokens), 1)
