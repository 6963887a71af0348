"""Report: one self-contained page, its figures as PNGs, Markdown tables, and answer files in Spec-Bench's format."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec.bench.audit import Audit
from specdec.bench.environment import caption
from specdec.bench.figures import draw_figures
from specdec.bench.metrics import Metrics
from specdec.bench.plan import BASELINE, at_once
from specdec.bench.records import Record, RunFolder
from specdec.bench.tables import BATCH, Cells, markdown_table, positions, system_table, tables_of
from specdec.costs.plots import require_bench_extra
from specdec.engine.questions import QuestionId, group_of
from specdec.settings.files import replacing, write_json, write_text

__all__ = ["answer_of", "caption_of", "markdown", "write_answers", "write_report"]

_SHADES = 4  # shades of a trace's steps

# Columns of the page's first table, which must fit a window of 1,100 pixels, and of the one below it.
_FIRST = (
    "tokens/step",
    "rows/step",
    "tokens/s",
    "x plain (95 %)",
    "decoding x plain",
    "x transformers (95 %)",
    "repeats",
)
_MORE = (
    *("answers", "decoding tokens/s", "prefill tokens/s", "Spec-Bench's own count", "peak MiB"),
    *("prefill", "draft", "target", "rest"),
)

_FIGURES = {
    "batch": (
        "Speedup over batch size",
        "Tokens per second of all questions, prefill included, by those of plain decoding one by one.",
    ),
    "speedup": (
        "Speed against plain decoding",
        "Wall clock, prefill included, of the same tokens on the same stack. Bars: 95 % bootstrap over questions.",
    ),
    "cost": (
        "What a step costs and what it brings",
        "The line is the target's forward alone. Filled marks: the time of a drafter's whole step in plain steps; "
        "hollow ones: its tokens. A drafter gains where the hollow mark is above the filled one; their ratio is its "
        "speedup, the prefill left out.",
    ),
}


def write_report(folder: RunFolder, audit: Audit, metrics: Metrics) -> Path:
    """Write ``report.html``, ``report.md``, ``metrics.json``, ``audit.json``, ``figures/`` and ``spec_bench/``.

    Returns the HTML file.

    Raises:
        ConfigError: jinja2 or matplotlib is not installed, or the disk cannot be written to.
    """
    require_bench_extra()
    manifest, records = folder.manifest(), folder.records()
    path = folder.path / "report.html"
    with folder.on_disk("the report"):
        write_json(folder.path / "metrics.json", {"groups": metrics.groups, "systems": asdict(metrics)["rows"]})
        verdicts = {label: asdict(verdict) | {"bugs": verdict.bugs} for label, verdict in audit.systems.items()}
        write_json(folder.path / "audit.json", {"passed": audit.passed, "systems": verdicts})
        alone = [record for record in records if at_once(record.system)[1] == 1]
        write_answers(alone, folder.path / "spec_bench", manifest["model"]["name"])
        write_text(folder.path / "report.md", markdown(metrics, manifest, audit))
        write_text(path, _page(metrics, manifest, audit, records, _images(folder, metrics, manifest, audit)))
    return path


def caption_of(manifest: Mapping[str, Any]) -> str:
    """Commit, versions, hardware and settings on one line, for figures."""
    plan = manifest["plan"]
    return (
        f"{manifest['model']['name']}, {manifest['model']['dtype']}, T={plan['temperature']:g}, "
        f"{manifest['questions']['asked']} questions, {plan['max_new_tokens']} new tokens, {plan['repeats']} repeats | "
        f"{caption(manifest['environment'])}"
    )


def markdown(metrics: Metrics, manifest: Mapping[str, Any], audit: Audit) -> str:
    """The Markdown tables over all questions and by kind, and how they were made."""
    lines = list[str]()
    for name, table in tables_of(metrics, manifest, audit).items():
        lines += [*markdown_table(table), ""]
        if name == "batch":
            lines += [f"{one}: left out, as {why}." for one, why in manifest["left_out"].items() if "@" in one] + [""]
    command = manifest["runs"][0]["command"]
    return "\n".join([*lines, caption_of(manifest) + (f" | `{command}`" if command else ""), ""])


def _images(folder: RunFolder, metrics: Metrics, manifest: Mapping[str, Any], audit: Audit) -> dict[str, bytes]:
    """Draw the figures, and write the manifest with the tables beside them."""
    place = folder.path / "figures"
    images: dict[str, bytes] = {}
    for name, figure in draw_figures(metrics, manifest, caption_of(manifest)).items():
        with replacing(place / f"{name}.png") as new:
            figure.savefig(new)
        images[name] = (place / f"{name}.png").read_bytes()
    if images:
        write_json(place / "manifest.json", {**manifest, "tables": tables_of(metrics, manifest, audit)})
    return images


def _page(
    metrics: Metrics,
    manifest: Mapping[str, Any],
    audit: Audit,
    records: Sequence[Record],
    images: Mapping[str, bytes],
) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specdec.bench"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = [
        {"name": name, "title": title, "about": about, "data": base64.b64encode(images[name]).decode("ascii")}
        for name, (title, about) in _FIGURES.items()
        if name in images
    ]
    errors = [record for record in records if record.error is not None]
    alone, texts = metrics.one_by_one(), {system: verdict.brief for system, verdict in audit.systems.items()}
    return environment.get_template("report.html.j2").render(
        caption=caption_of(manifest),
        command=manifest["runs"][0]["command"],
        manifest=json.dumps(manifest, indent=2),
        left_out=manifest["left_out"],
        lossy=[system for system, about in manifest["systems"].items() if about["lossy"]],
        baseline=BASELINE,
        first=_filled(system_table(alone, _FIRST)),
        more=_filled(system_table(alone, _MORE)),
        tables={group: _filled(system_table(alone, _FIRST, group)) for group in metrics.groups},
        batch=system_table(metrics, BATCH, texts=texts) if len(metrics.rows) > len(alone.rows) else [],
        positions=positions(alone),
        verdicts=[(system, str(verdict), bool(verdict.bugs)) for system, verdict in audit.systems.items()],
        divergences=[str(divergence) for verdict in audit.systems.values() for divergence in verdict.divergences][:50],
        passed=audit.passed,
        figures=figures,
        traces=traces(records, list(alone.rows)),
        errors=errors[:50],
        failed=len(errors),
        total=len(records),
    )


def _filled(cells: Cells) -> Cells:
    """A table without the columns in which no system has a figure."""
    kept = [place for place in range(len(cells[0])) if any(row[place] for row in cells[1:])]
    return [[row[place] for place in kept] for row in cells]


def traces(records: Sequence[Record], systems: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Title -> a trace per system, for the first question of each group."""
    chosen: dict[str, QuestionId] = {}
    for record in records:
        chosen.setdefault(group_of(record.category), record.question_id)
    by_question: dict[str, list[dict[str, Any]]] = {}
    for group, question in chosen.items():
        answers = {r.system: r for r in records if r.question_id == question and r.repeat == 0 and r.turns}
        by_question[f"{group}, question {question}"] = [_trace(answers[s]) for s in systems if s in answers]
    return by_question


def _trace(record: Record) -> dict[str, Any]:
    """An answer as its steps' texts; shade 0 is a plain step, shades 1 to 4 alternate, and ``about`` is a tooltip."""
    pieces: list[dict[str, Any]] = []
    step = coloured = 0
    for number, turn in enumerate(record.turns, 1):
        if number > 1:
            pieces.append({"text": f"\n--- turn {number} ---\n", "shade": 0, "about": "the next question"})
        for place, (text, length) in enumerate(zip(turn.pieces, turn.accept_lengths, strict=False)):
            step, coloured = step + 1, coloured + (length > 1)
            rows = f" from {turn.rows[place]} rows" if place < len(turn.rows) else ""
            about = f"{record.system}, step {step}: {length} {'token' if length == 1 else 'tokens'}{rows}"
            pieces.append({"text": text, "shade": 1 + coloured % _SHADES if length > 1 else 0, "about": about})
    mean = record.tokens / max(record.steps, 1)
    summary = f"{record.tokens} tokens in {record.steps} steps, {mean:.2f} per step"
    return {"system": record.system, "summary": summary, "pieces": pieces}


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
