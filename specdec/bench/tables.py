"""Tables of a run as cells, titles first: those of its report, which docs show too, and short ones for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.bench.audit import Audit
from specdec.bench.metrics import DEPTH, OVERALL, Interval, Metrics, Row

__all__ = ["COLUMNS", "Cells", "system_table", "tables_of"]

Cells = list[list[str]]

_SYSTEMS = ("tokens/step", "rows/step", "tokens/s", "prefill tokens/s", "x plain (95 %)", "x transformers", "repeats")
_BATCH = (
    "tokens/s", "x plain (95 %)", "x transformers", "tokens/step", "first token ms, p95", "between ms, p95", "rest us",
)  # fmt: skip
_TIME = (
    "answers", "decoding tokens/s", "decoding x plain", "Spec-Bench's own count", "peak MiB",
    "prefill", "draft", "target", "rest",
)  # fmt: skip


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


def system_table(metrics: Metrics, columns: Sequence[str], *, texts: Mapping[str, object] | None = None) -> Cells:
    """A row per system over all questions; ``texts``: what the audit says of its texts, as a last column."""
    last = [] if texts is None else ["text"]
    rows = [
        [system, *(COLUMNS[name](groups[OVERALL]) for name in columns), *(str((texts or {})[system]) for _ in last)]
        for system, groups in metrics.rows.items()
    ]
    return [["system", *columns, *last], *rows]


def tables_of(metrics: Metrics, manifest: Mapping[str, Any], audit: Audit) -> dict[str, Cells]:
    """The tables of a run, in Markdown's words: ``systems`` over all questions; ``kinds``, decoding speed relative to
    plain decoding by kind of question; ``batch``, where several were answered at once; ``time``, where it goes; and
    ``reach``, the share of steps that accept at least n tokens by n, CTAR."""
    alone = metrics.one_by_one()
    tables = {"systems": system_table(alone, _SYSTEMS, texts=audit.systems)}
    if len(metrics.groups) > 1:
        tables["kinds"] = [["decoding x plain", *metrics.groups, "mean of the kinds"]]
        for system, groups in alone.rows.items():
            speeds = [row.decode_speedup.value for name in metrics.groups if (row := groups[name]).decode_speedup]
            cells = [COLUMNS["decoding x plain"](groups[name]) for name in metrics.groups]
            mean = f"{statistics.mean(speeds):.2f}" if len(speeds) == len(metrics.groups) else ""
            tables["kinds"].append([system, *cells, mean])
    if len(metrics.rows) > len(alone.rows):
        tables["batch"] = system_table(metrics, _BATCH, texts=audit.systems)
    tables["time"] = system_table(alone, _TIME)
    steps = {system: groups[OVERALL].ctar for system, groups in alone.rows.items() if groups[OVERALL].ctar}
    if steps:
        titles = ["drafted tokens accepted", *(f">= {depth}" for depth in range(1, DEPTH + 1))]
        tables["reach"] = [titles, *([system, *map(_percent, ctar)] for system, ctar in steps.items())]
    for table in tables.values():
        for cells in table[1:]:
            cells[0] = f"`{cells[0]}`" + (" (lossy)" if manifest["systems"][cells[0]]["lossy"] else "")
    return tables
