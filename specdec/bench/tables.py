"""Tables and lines of the bench commands."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.bench.audit import Audit, Verdict
from specdec.bench.compare import Comparison
from specdec.bench.metrics import OVERALL, Interval, Metrics, Row

__all__ = ["batch_figures", "batch_table", "comparison_table", "figures_of", "metrics_table", "print_verdicts"]


def figures_of(row: Row) -> dict[str, str]:
    """A row's figures as text, by the title of their column; empty where there is no figure."""
    spec = row.spec_bench
    return {
        "answers": f"{row.answered}" + (f" ({row.failed} failed)" if row.failed else ""),
        "tokens/step": _number(row.tokens_per_step),
        "rows/step": _number(row.rows_per_step, 1),
        "tokens/s": _number(row.tokens_per_second, 0),
        "decoding tokens/s": _number(row.decode_tokens_per_second, 0),
        "prefill tokens/s": _number(row.prefill_tokens_per_second, 0),
        "x plain (95 %)": _span(row.speedup),
        "decoding x plain": _number(row.decode_speedup),
        "x transformers (95 %)": _span(row.speedup_rival),
        "Spec-Bench's own count": _number(spec.get("speedup")),
        "repeats": "" if row.repeats is None else f"{row.repeats:.0%}",
        "peak MiB": "" if row.peak_memory is None else f"{row.peak_memory / 2**20:.0f}",
        "x transformers": _number(row.speedup_rival),
    }


def batch_figures(row: Row) -> dict[str, str]:
    """A row's throughput and latency as text, by the title of their column; empty where there is no figure."""
    figures = figures_of(row)
    return {
        **{name: figures[name] for name in ("tokens/s", "x plain (95 %)", "x transformers", "tokens/step")},
        "first token ms, p95": _milliseconds(row.first_seconds),
        "between ms, p95": _milliseconds(row.between_seconds),
        "host us": "" if row.host_seconds is None else f"{1e6 * row.host_seconds:.0f}",
    }


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * one:.3g}" if one < 0.1 else f"{1e3 * one:.0f}" for one in seconds)


def _number(value: Interval | float | None, digits: int = 2) -> str:
    if isinstance(value, Interval):
        value = value.value
    return "" if value is None else f"{value:.{digits}f}"


def _span(value: Interval | None) -> str:
    return "" if value is None else f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"


def metrics_table(metrics: Metrics, audit: Audit) -> Table:
    """A row per system over all questions; it fits in 80 columns."""
    shown = ("tokens/step", "rows/step", "tokens/s", "x plain (95 %)", "x transformers")
    table = _table(("tokens\n/step", "rows\n/step", "tokens\n/s", "x plain\n(95 %)", "x trans-\nformers"))
    for system, groups in metrics.rows.items():
        figures = figures_of(groups[OVERALL])
        table.add_row(escape(system), *(figures[name] for name in shown), _brief(audit.systems[system]))
    return table


def batch_table(metrics: Metrics, audit: Audit) -> Table:
    """Throughput and latency over all questions, a row per system and batch size; it fits in 80 columns."""
    times = ("first token ms, p95", "between ms, p95", "host us")
    table = _table(("tokens\n/s", "x plain", "first token\nms, p95", "between\nms, p95", "host\nus"))
    for system, groups in metrics.rows.items():
        row = groups[OVERALL]
        figures, verdict = batch_figures(row), _brief(audit.systems[system])
        speeds = (figures["tokens/s"], _number(row.speedup))
        table.add_row(escape(system), *speeds, *(figures[name] for name in times), verdict)
    return table


def _table(titles: Sequence[str]) -> Table:
    """An empty table for figures by system, with a column for the audit's outcome."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("system", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)
    return table


def _brief(verdict: Verdict) -> str:
    return f"[bold red]{verdict.brief}[/]" if verdict.bugs else verdict.brief


def print_verdicts(audit: Audit, console: Console, *, only_different: bool = False) -> None:
    """Print a line per system, and one for each of its first ten differences, bugs first."""
    for system, verdict in audit.systems.items():
        if only_different and not verdict.divergences:
            continue
        style = "bold red" if verdict.bugs else "dim" if verdict.uncompared else "green"
        console.print(f"[bold]{escape(system)}[/]: [{style}]{escape(str(verdict))}[/]", soft_wrap=True)
        for divergence in sorted(verdict.divergences, key=lambda d: d.verdict)[:10]:  # BUG sorts before rounding
            console.print(f"  {escape(str(divergence))}", soft_wrap=True, highlight=False)


def comparison_table(comparison: Comparison, everything: bool) -> Table:
    """The overall figures of both runs, and those of categories that changed; or all with ``everything``."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("system", "questions", "figure"):
        table.add_column(title, no_wrap=True)
    for title in ("A", "B", "B / A (99 %)"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("moved")
    for change in comparison.changes:
        if not everything and change.group != OVERALL and not change.moved:
            continue
        ratio = change.ratio
        moved = "" if not change.moved else "[green]up[/]" if ratio.value > 1 else "[red]down[/]"
        table.add_row(
            escape(change.system),
            escape(change.group),
            change.figure,
            *(f"{value:.2f}" if value < 100 else f"{value:.0f}" for value in (change.before, change.after)),
            f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})",
            moved,
        )
    return table
