"""Report: one self-contained page with a run's tables and plots, and files for programs beside it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.bench.audit import Audit
from specdec.bench.environment import caption_of
from specdec.bench.metrics import OVERALL, Metrics, Row
from specdec.bench.plan import BASELINE, at_once
from specdec.bench.records import Record, RunFolder
from specdec.bench.spec_bench import write_answers
from specdec.bench.tables import Cells, tables_of
from specdec.costs.plots import new_figure, require_bench_extra, scale_to_rows, sign, tidy
from specdec.engine.questions import QuestionId, group_of
from specdec.settings.files import write_json, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plots", "write_report"]

# Okabe and Ito's colours, which most colour-blind people can distinguish, and three more; then markers differ.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#6A3D9A", "#B2182B", "#1B7837",
)  # fmt: skip
_MARKERS = "osD^vPX*<>"
_PLAIN = "#777777"
_SHADES = 4  # shades of a trace's steps

# Name of a table -> its title on the page, and what it says.
_SECTIONS = {
    "systems": (
        "Overall",
        "Tokens are counted alike for all systems, to the end of the sequence and within the same budget; speed is by "
        "the wall clock with the prefill, the median of the repeats, with a 95 % bootstrap over questions. Repeats: "
        "tokens inside an 8-token n-gram that the output had before, which flatters every drafter that copies. Text: "
        "each answer beside plain decoding's, token by token.",
    ),
    "kinds": ("By kind of question", "Decoding without the prefill, plain decoding = 1."),
    "batch": (
        "Many at once",
        "system@4 answers four questions at once. x plain is by plain decoding one by one, x transformers by its "
        "greedy decoding of as many at once. The first token is timed from when its prompt is taken; a step's tokens "
        "share the time since the step before; median and 95th percentile. Rest: per step of a sequence, what is "
        "neither drafting nor the target's forward.",
    ),
    "time": (
        "Where the time goes",
        "Prefill to rest: shares of the wall clock; the rest is verification, commits and the loop. Spec-Bench's own "
        "count is its published script's: the mean of the questions' speeds, the baseline's tokens counted by "
        "tokenizing its text again. In the plot the line is the target's forward alone. Filled marks: the time of a "
        "drafter's whole step in plain steps; hollow ones: its tokens. A drafter gains where the hollow mark is above "
        "the filled one; their ratio is its speedup, the prefill left out.",
    ),
    "reach": ("How far steps reach", "CTAR: the share of steps that accept at least n draft tokens, by n."),
}


def write_report(folder: RunFolder, audit: Audit, metrics: Metrics) -> Path:
    """Write ``report.html``, ``metrics.json``, ``audit.json`` and ``spec_bench/``, and the tables into the manifest.

    Returns the page.

    Raises:
        ConfigError: jinja2 or matplotlib is not installed, or the disk cannot be written to.
    """
    require_bench_extra()
    manifest, records, path = folder.manifest(), folder.records(), folder.path / "report.html"
    manifest["tables"] = tables_of(metrics, manifest, audit)
    with folder.on_disk("the report"):
        write_json(folder.path / "metrics.json", {"groups": metrics.groups, "systems": asdict(metrics)["rows"]})
        verdicts = {label: asdict(verdict) | {"bugs": verdict.bugs} for label, verdict in audit.systems.items()}
        write_json(folder.path / "audit.json", {"passed": audit.passed, "systems": verdicts})
        alone = [record for record in records if at_once(record.system)[1] == 1]
        write_answers(alone, folder.path / "spec_bench", manifest["model"]["name"])
        folder.write_manifest(manifest)
        write_text(path, _page(metrics, manifest, audit, records))
    return path


def _page(metrics: Metrics, manifest: dict[str, Any], audit: Audit, records: Sequence[Record]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("specdec.bench"), undefined=StrictUndefined, autoescape=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    caption, tables = caption_of(manifest), manifest.pop("tables")
    drawn = {name: _png(figure, caption) for name, figure in plots(metrics, manifest).items()}
    errors = [record for record in records if record.error is not None]
    return environment.get_template("report.html.j2").render(
        caption=caption,
        command=manifest["runs"][0]["command"],
        passed=audit.passed,
        failed=len(errors),
        total=len(records),
        sections=[(*_SECTIONS[name], _filled(table), drawn.get(name)) for name, table in tables.items()],
        traces=_traces(records, list(metrics.one_by_one().rows)),
        divergences=[str(divergence) for verdict in audit.systems.values() for divergence in verdict.divergences][:50],
        errors=[f"{r.system}, question {r.question_id}, repeat {r.repeat + 1}: {r.error}" for r in errors[:50]],
        left_out=[f"{name}: {reason}" for name, reason in manifest["left_out"].items()],
        manifest=json.dumps(manifest, indent=2),
    )


def _filled(cells: Cells) -> Cells:
    """A table without the columns in which no system has a figure, and without Markdown's quotes."""
    kept = [place for place in range(len(cells[0])) if any(row[place] for row in cells[1:])]
    return [[row[place].replace("`", "") for place in kept] for row in cells]


def _traces(records: Sequence[Record], systems: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Title and a trace per system, of the first question of each group."""
    chosen: dict[str, QuestionId] = {}
    for record in records:
        chosen.setdefault(group_of(record.category), record.question_id)
    for group, question in chosen.items():
        answers = {r.system: r for r in records if r.question_id == question and r.repeat == 0 and r.turns}
        yield f"{group}, question {question}", [_trace(answers[s]) for s in systems if s in answers]


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


# -- Plots, by matplotlib's object interface: no window, no global state -----------------------------------------------


def plots(metrics: Metrics, manifest: Mapping[str, Any]) -> dict[str, Figure]:
    """A plot for each table that has one: ``systems``, ``batch`` and ``time``; one without data is left out."""
    alone, rows = metrics.one_by_one(), {system: groups[OVERALL] for system, groups in metrics.rows.items()}
    styles = _styles(list(alone.rows))
    drawn = {
        "systems": _speedup(alone, styles),
        "batch": _batch(rows, styles),
        "time": _cost({system: rows[system] for system in alone.rows}, styles, manifest.get("cost") or {}),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _png(figure: Figure, caption: str) -> str:
    """A figure with how it was made below it, in base 64."""
    sign(figure, caption.replace(" | ", "\n"))
    figure.savefig(data := io.BytesIO())
    return base64.b64encode(data.getvalue()).decode("ascii")


Styles = Mapping[str, Mapping[str, Any]]


def _styles(systems: Sequence[str]) -> Styles:
    styles = {BASELINE: {"color": _PLAIN, "marker": "o"}}
    for place, system in enumerate(s for s in systems if s != BASELINE):
        marker = _MARKERS[(place + place // len(_COLOURS)) % len(_MARKERS)]
        styles[system] = {"color": _COLOURS[place % len(_COLOURS)], "marker": marker}
    return styles


def _one_panel(height: float) -> tuple[Figure, Axes]:
    """A figure with one panel, and room for a legend."""
    figure = new_figure(7.6, height)
    return figure, figure.subplots()


def _speedup(metrics: Metrics, styles: Styles) -> Figure | None:
    """A panel for all questions and for each group: speed against plain decoding, with its interval."""
    systems = [s for s in metrics.rows if s != BASELINE and metrics.rows[s][OVERALL].speedup is not None]
    if not systems:
        return None
    groups = [OVERALL, *(metrics.groups if len(metrics.groups) > 1 else ())]
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    figure = new_figure(2.6 * columns + 0.8, (0.24 * len(systems) + 0.95) * lines + 0.8)
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for place, (group, axes) in enumerate(zip(groups, panels, strict=False)):
        lowest = place + columns >= len(groups)
        tidy(axes, group.replace("_", " "), "speed, plain decoding = 1" if lowest else "")
        axes.tick_params(labelbottom=lowest)
        for height, system in enumerate(systems):
            if (found := metrics.rows[system][group].speedup) is not None:
                error = [[max(0.0, found.value - found.low)], [max(0.0, found.high - found.value)]]
                axes.errorbar(found.value, height, xerr=error, ms=5, lw=1.5, capsize=2, **styles[system])
        axes.axvline(1, color=_PLAIN, lw=1, zorder=0)
        axes.set_yticks(range(len(systems)), systems)
        axes.set_ylim(len(systems) - 0.5, -0.5)
        axes.grid(axis="x", color="#E5E5E5", lw=0.7)
    return figure


def _batch(rows: Mapping[str, Row], styles: Styles) -> Figure | None:
    """Speedup over batch size, a line per system; a system that answers one question at a time is a point."""
    lines: dict[str, dict[int, float]] = {}
    for label, row in rows.items():
        system, size = at_once(label)
        if row.speedup is not None:
            lines.setdefault(system, {})[size] = row.speedup.value
    sizes = sorted({size for points in lines.values() for size in points})
    if len(sizes) < 2:
        return None
    figure, axes = _one_panel(4.2)
    for system, points in lines.items():
        axes.plot(list(points), list(points.values()), lw=1.6, ms=5, label=system, clip_on=False, **styles[system])
    axes.axhline(1, color=_PLAIN, lw=1, zorder=0)
    scale_to_rows(axes, sizes)
    tidy(axes, "Speedup over batch size", "questions at once", "tokens/s, plain decoding one by one = 1")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def _cost(rows: Mapping[str, Row], styles: Styles, cost: Mapping[str, Any]) -> Figure | None:
    """The cost of a forward by rows, and over it the cost and the tokens of each drafter's steps."""
    plain = rows.get(BASELINE)
    if not cost.get("seconds") or plain is None or not plain.step_seconds:
        return None
    seconds = {int(count): taken for count, taken in cost["seconds"].items()}
    relative = [taken / seconds[min(seconds)] for taken in seconds.values()]
    figure, axes = _one_panel(4.4)
    axes.plot(list(seconds), relative, color="#333333", lw=1.4, label="forward alone")
    for system, row in rows.items():
        if row.rows_per_step is None or not row.step_seconds or row.tokens_per_step is None or system == BASELINE:
            continue
        x, step, gain = row.rows_per_step, row.step_seconds / plain.step_seconds, row.tokens_per_step.value
        axes.plot([x, x], [step, gain], color=styles[system]["color"], lw=1, alpha=0.7)
        axes.plot(x, step, ls="", ms=6, label=f"{system}: {gain / step:.2f}x", **styles[system])
        axes.plot(x, gain, ls="", ms=7, mfc="white", **styles[system])
    scale_to_rows(axes, list(seconds))
    title = f"Cost of a step by its rows, at {cost['context']} tokens of context"
    tidy(axes, title, "rows of a step", "plain steps of time (filled) or tokens (hollow)")
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure
