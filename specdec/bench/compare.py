"""Compare: two runs side by side, and the figures that changed by more than noise.

A system's speedup is a ratio within one run, so a slower machine changes both of its parts. The ratio of the two runs'
speedups is bootstrapped over the questions, drawn together for both runs. It has changed if its 99 % interval excludes
1 (99 and not 95, as a comparison tests many pairs at once).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.bench.metrics import OVERALL, Answers, Interval, Sums, ratio_interval, speed_of, speedup_of
from specdec.bench.plan import BASELINE
from specdec.bench.records import Record, RunFolder, repeats_of
from specdec.engine.questions import QuestionId, group_of
from specdec.errors import ConfigError

__all__ = ["Change", "Comparison", "compare_runs"]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of one system in both runs, and the ratio of B to A with its 99 % interval."""

    system: str
    group: str
    figure: str
    before: float
    after: float
    ratio: Interval

    @property
    def moved(self) -> bool:
        return self.ratio.low > 1 or self.ratio.high < 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """All changes; ``notes`` list failures and the differences between the runs' settings.

    Plain decoding answered ``answered`` of ``asked`` questions in both runs.
    """

    changes: list[Change]
    notes: list[str]
    answered: int
    asked: int

    def cells(self, everything: bool) -> list[list[str]]:
        """A table of the overall figures of both runs, and of categories that moved; or of all with ``everything``."""
        table = [["system", "questions", "figure", "A", "B", "B / A (99 %)", "moved"]]
        for change in self.changes:
            if everything or change.group == OVERALL or change.moved:
                sides = (f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in (change.before, change.after))
                ratio, moved = change.ratio, ("up" if change.ratio.value > 1 else "down") if change.moved else ""
                span = f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
                table.append([change.system, change.group, change.figure, *sides, span, moved])
        return table


def compare_runs(a: RunFolder, b: RunFolder) -> Comparison:
    """Compare the systems that both runs have, on the questions that both answered.

    A question whose answer failed is left out, and a note says so.

    Raises:
        ConfigError: a folder has no run; models or questions differ; no question was answered in both; or a run has
            not ended.
    """
    first, second = a.manifest(), b.manifest()
    for what, key, part in (("models", "model", "fingerprint"), ("questions", "questions", "sha256")):
        if first[key][part] != second[key][part]:
            names = [f"{m[key].get('name', m[key].get('file'))} ({m[key][part][:10]})" for m in (first, second)]
            raise ConfigError(
                f"the runs have different {what}: {names[0]} and {names[1]}; compare two runs with the same ones"
            )
    records = [folder.records() for folder in (a, b)]
    for folder, manifest, run in zip((a, b), (first, second), records, strict=True):
        wanted, there = manifest["questions"]["asked"], len({r.question_id for r in run if r.system == BASELINE})
        if there < wanted:  # a failure is an answer, too
            raise ConfigError(
                f"{str(folder.path)!r} has plain answers to {there} of {wanted} questions; run `specdec bench` with "
                "that --out again to answer the rest"
            )
    answers = [repeats_of(run) for run in records]
    asked = min(manifest["questions"]["asked"] for manifest in (first, second))
    answered = len(set.intersection(*({q for s, q in run if s == BASELINE} for run in answers)))
    if not answered:
        raise ConfigError(
            f"plain decoding answered no question in both {str(a.path)!r} and {str(b.path)!r}, so there is nothing to "
            "compare; look at the errors in their answers.jsonl"
        )
    systems = [label for label in first["systems"] if label in second["systems"]]
    changes = [change for label in systems for change in _changes(label, *answers)]
    notes = [note for name, run in zip("AB", records, strict=True) for note in _failures(name, run)]
    return Comparison(changes, [*notes, *_notes(first, second)], answered, asked)


def _failures(name: str, records: Sequence[Record]) -> list[str]:
    """How many answers of each system failed in a run, with the first error."""
    errors: dict[str, list[str]] = {}
    for record in records:
        if record.error is not None:
            errors.setdefault(record.system, []).append(f"question {record.question_id}: {record.error}")
    return [f"{len(found)} answers of {label} failed in {name}; {found[0]}" for label, found in errors.items()]


def _changes(label: str, a: Answers, b: Answers) -> list[Change]:
    wanted = dict.fromkeys((label, BASELINE))
    shared = [q for s, q in a if s == label and all((name, q) in run for name in wanted for run in (a, b))]
    groups: dict[str, list[QuestionId]] = {OVERALL: shared}
    for question in shared:
        groups.setdefault(group_of(a[label, question][0].category), []).append(question)
    figures = {"tokens/s": _speed} if label == BASELINE else {"x plain": _speedup, "tokens/step": _tokens_per_step}
    changes = []
    for group, ids in groups.items():
        for name, figure in figures.items():
            (top, bottom), (new_top, new_bottom) = (figure(run, label, ids) for run in (a, b))
            ratio = ratio_interval([*new_top, *bottom], [*new_bottom, *top], 99.0)
            if ratio is not None:
                before, after = _quotient(top, bottom), _quotient(new_top, new_bottom)
                changes.append(Change(label, group, name, before, after, ratio))
    return changes


def _quotient(tops: Sums, bottoms: Sums) -> float:
    return math.prod(map(sum, tops)) / math.prod(map(sum, bottoms))


def _speed(run: Answers, label: str, ids: Sequence[QuestionId]) -> tuple[Sums, Sums]:
    tokens, seconds = speed_of([run[label, q] for q in ids])
    return [tokens], [seconds]


def _speedup(run: Answers, label: str, ids: Sequence[QuestionId]) -> tuple[Sums, Sums]:
    return speedup_of(run, label, BASELINE, ids)


def _tokens_per_step(run: Answers, label: str, ids: Sequence[QuestionId]) -> tuple[Sums, Sums]:
    first = [run[label, q][0] for q in ids]
    return [[float(record.tokens) for record in first]], [[float(record.steps) for record in first]]


def _notes(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    notes = []
    for part, told_elsewhere in (("plan", {"drafters", "systems", "model", "questions"}), ("environment", set())):
        for name in sorted(a[part].keys() & b[part].keys() - told_elsewhere):
            if a[part][name] != b[part][name]:
                notes.append(f"{name}: {a[part][name]!r} and {b[part][name]!r}")
    for label in a["systems"].keys() & b["systems"].keys():
        if a["systems"][label]["options"] != b["systems"][label]["options"]:
            notes.append(f"options of {label}: {a['systems'][label]['options']} and {b['systems'][label]['options']}")
    for label in sorted(a["systems"].keys() ^ b["systems"].keys()):
        notes.append(f"{label} is in one run only")
    return notes
