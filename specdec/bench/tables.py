"""Tables of a run as cells, titles first, and how they are written: in Markdown and on a terminal."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specdec.bench.audit import BUG, Audit
from specdec.bench.metrics import DEPTH, OVERALL, Interval, Metrics, Row

__all__ = [
    "BATCH",
    "COLUMNS",
    "Cells",
    "markdown_table",
    "positions",
    "print_verdicts",
    "system_table",
    "tables_of",
    "terminal_table",
]

Cells = list[list[str]]

_SYSTEMS = ("tokens/step", "rows/step", "tokens/s", "prefill tokens/s", "x plain (95 %)", "x transformers", "repeats")
BATCH = (
    "tokens/s", "x plain (95 %)", "x transformers", "tokens/step", "first token ms, p95", "between ms, p95", "rest us",
)  # fmt: skip
"""The columns of throughput and latency, of systems that answer several questions at once."""
_LEFT = ("system", "questions", "figure", "drafter", "decoding x plain", "text", "moved")
_STYLES = {BUG: "bold red", "up": "green", "down": "red"}  # of a row's last cell on a terminal


def _number(value: Interval | float | None, digits: int = 2) -> str:
    if isinstance(value, Interval):
        value = value.value
    return "" if value is None else f"{value:.{digits}f}"


def _span(value: Interval | None) -> str:
    return "" if value is None else f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * one:.3g}" if one < 0.1 else f"{1e3 * one:.0f}" for one in seconds)


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "answers": lambda row: f"{row.answered}" + (f" ({row.failed} failed)" if row.failed else ""),
    "tokens/step": lambda row: _number(row.tokens_per_step),
    "rows/step": lambda row: _number(row.rows_per_step, 1),
    "tokens/s": lambda row: _number(row.tokens_per_second, 0),
    "decoding tokens/s": lambda row: _number(row.decode_tokens_per_second, 0),
    "prefill tokens/s": lambda row: _number(row.prefill_tokens_per_second, 0),
    "x plain": lambda row: _number(row.speedup),
    "x plain (95 %)": lambda row: _span(row.speedup),
    "decoding x plain": lambda row: _number(row.decode_speedup),
    "x transformers": lambda row: _number(row.speedup_rival),
    "x transformers (95 %)": lambda row: _span(row.speedup_rival),
    "Spec-Bench's own count": lambda row: _number(row.spec_bench.get("speedup")),
    "repeats": lambda row: _percent(row.repeats),
    "peak MiB": lambda row: "" if row.peak_memory is None else f"{row.peak_memory / 2**20:.0f}",
    "first token ms, p95": lambda row: _milliseconds(row.first_seconds),
    "between ms, p95": lambda row: _milliseconds(row.between_seconds),
    "rest us": lambda row: "" if row.rest_seconds is None else f"{1e6 * row.rest_seconds:.0f}",
    **{
        phase: lambda row, phase=phase: _percent(row.shares.get(phase))  # type: ignore[misc]
        for phase in ("prefill", "draft", "target", "rest")
    },
}
"""Title of a column -> its text for a system; empty where there is no figure."""


def system_table(
    metrics: Metrics, columns: Sequence[str], group: str = OVERALL, *, texts: Mapping[str, object] | None = None
) -> Cells:
    """A row per system; ``texts``: what the audit says of each system's texts, as a last column."""
    last = [] if texts is None else ["text"]
    rows = [
        [system, *(COLUMNS[name](groups[group]) for name in columns), *(str((texts or {})[system]) for _ in last)]
        for system, groups in metrics.rows.items()
    ]
    return [["system", *columns, *last], *rows]


def tables_of(metrics: Metrics, manifest: Mapping[str, Any], audit: Audit) -> dict[str, Cells]:
    """The tables of a run: ``systems`` over all questions; ``batch``, where several were answered at once; and
    ``kinds``, decoding speed relative to plain decoding by kind of question."""
    alone = metrics.one_by_one()
    tables = {"systems": system_table(alone, _SYSTEMS, texts=audit.systems)}
    if len(metrics.rows) > len(alone.rows):
        tables["batch"] = system_table(metrics, BATCH, texts=audit.systems)
    if len(metrics.groups) > 1:
        tables["kinds"] = [["decoding x plain", *metrics.groups, "mean of the kinds"]]
        for system, groups in alone.rows.items():
            speeds = [row.decode_speedup.value for name in metrics.groups if (row := groups[name]).decode_speedup]
            cells = [COLUMNS["decoding x plain"](groups[name]) for name in metrics.groups]
            mean = f"{statistics.mean(speeds):.2f}" if len(speeds) == len(metrics.groups) else ""
            tables["kinds"].append([system, *cells, mean])
    for table in tables.values():
        for cells in table[1:]:
            cells[0] = f"`{cells[0]}`" + (" (lossy)" if manifest["systems"][cells[0]]["lossy"] else "")
    return tables


def positions(metrics: Metrics) -> list[Cells]:
    """CTAR, and acceptance by position, over all questions."""
    rows = {system: groups[OVERALL] for system, groups in metrics.rows.items() if groups[OVERALL].ctar}
    depths = [str(depth) for depth in range(1, DEPTH + 1)]
    reach = [["CTAR(w)", *depths], *([system, *map(_percent, row.ctar)] for system, row in rows.items())]
    accepted = [["accepted at position, if reached", *depths]]
    return [reach, accepted + [[system, *map(_percent, row.acceptance)] for system, row in rows.items()]]


def markdown_table(cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; names and texts are aligned left, figures right."""
    rules = ["---" if title in _LEFT else "--:" for title in cells[0]]
    return [f"| {' | '.join(row)} |" for row in (cells[0], rules, *cells[1:])]


def terminal_table(cells: Cells) -> Table:
    """A table for a terminal of 80 columns."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in cells[0]:
        two_lines = re.sub(r"(?<=\S)(?=/\S)| (?=\(|ms)|(?<=trans)(?=formers)", "\n", title)
        table.add_column(escape(two_lines), justify="left" if title in _LEFT else "right", no_wrap=True)
    for row in cells[1:]:
        table.add_row(*map(Text, row[:-1]), Text(row[-1], style=_STYLES.get(row[-1], "")))
    return table


def print_verdicts(audit: Audit, console: Console, *, only_different: bool = False) -> None:
    """Print a line per system, and one for each of its first ten differences, bugs first."""
    for system, verdict in audit.systems.items():
        if only_different and not verdict.divergences:
            continue
        style = "bold red" if verdict.bugs else "dim" if verdict.uncompared else "green"
        console.print(f"[bold]{escape(system)}[/]: [{style}]{escape(str(verdict))}[/]", soft_wrap=True)
        for divergence in sorted(verdict.divergences, key=lambda d: d.verdict)[:10]:  # BUG sorts before rounding
            console.print(f"  {escape(str(divergence))}", soft_wrap=True, highlight=False)
