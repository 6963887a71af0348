"""Tables and lines of the bench commands."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.bench.audit import Audit
from specdec.bench.compare import Comparison
from specdec.bench.metrics import OVERALL, Interval, Metrics

__all__ = ["comparison_table", "metrics_table", "print_verdicts"]


def metrics_table(metrics: Metrics, found: Audit) -> Table:
    """A row per system, over all questions; it fits 80 columns."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("system", no_wrap=True)
    for title in ("tokens\n/step", "rows\n/step", "tokens\n/s", "x plain\n(95 %)", "x trans-\nformers"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("text", no_wrap=True)

    def number(value: Interval | None, digits: int = 2) -> str:
        return "" if value is None else f"{value.value:.{digits}f}"

    for system, groups in metrics.rows.items():
        row = groups[OVERALL]
        speedup = row.speedup
        verdict = found.systems[system]
        table.add_row(
            escape(system),
            number(row.tokens_per_step),
            "" if row.rows_per_step is None else f"{row.rows_per_step:.1f}",
            number(row.tokens_per_second, 0),
            "" if speedup is None else f"{speedup.value:.2f} ({speedup.low:.2f}-{speedup.high:.2f})",
            number(row.speedup_rival),
            f"[bold red]{verdict.brief}[/]" if verdict.bugs else verdict.brief,
        )
    return table


def print_verdicts(found: Audit, console: Console, *, only_different: bool = False) -> None:
    """A line per system, and one for each of its first ten differences, bugs first."""
    for system, verdict in found.systems.items():
        if only_different and not verdict.divergences:
            continue
        style = "bold red" if verdict.bugs else "dim" if verdict.uncompared else "green"
        console.print(f"[bold]{escape(system)}[/]: [{style}]{escape(str(verdict))}[/]", soft_wrap=True)
        for divergence in sorted(verdict.divergences, key=lambda d: d.verdict)[:10]:  # BUG sorts before rounding
            console.print(f"  {escape(str(divergence))}", soft_wrap=True, highlight=False)


def comparison_table(found: Comparison, everything: bool) -> Table:
    """Overall figures of both runs, and those of categories that moved; or all."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("system", "questions", "figure"):
        table.add_column(title, no_wrap=True)
    for title in ("A", "B", "B / A (99 %)"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("moved")
    for change in found.changes:
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
