"""``specdec tune``: the cost of a step by its rows on this machine, as a table, a plot and a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.engine.config import ModelOptions, resolve
from specdec.errors import ConfigError
from specdec.settings.files import check_place, replacing, writing
from specdec.settings.options import Given, option, with_options
from specdec.settings.validation import Sizes

if TYPE_CHECKING:
    from rich.table import Table

    from specdec.costs.curve import CostCurve
    from specdec.costs.shares import Shares

__all__ = ["plot", "table", "tune"]


@dataclass(frozen=True, kw_only=True)
class TuneOptions(ModelOptions):
    """Of what the cost is measured."""

    rows: Sizes = option(list, "Rows to time; 1 is always among them.", metavar="1,2,4,...", commas=True)
    lengths: Sizes = option(list, "Tokens in the cache.", metavar="128,512,...", commas=True)


@with_options(TuneOptions)
def tune(
    given: Given,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="Where to put the figures (default: where auto finds them).")] = None,
    figure: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw them, as PNG, SVG or PDF.")
    ] = None,
) -> None:
    """Measure the cost of a forward by its rows, and keep it for row policies.

    Run it while the machine is quiet, once per model, dtype, device and number of threads that you use.
    """
    from rich.console import Console
    from rich.progress import Progress

    from specdec.costs.measuring import LENGTHS, ROWS, describe, measure, stored_at
    from specdec.costs.plots import require_bench_extra
    from specdec.costs.shares import shares
    from specdec.engine.load import load

    options = resolve(TuneOptions, given, where="tune")
    rows, lengths = sorted({1, *(options.rows or ROWS)}), sorted({*(options.lengths or LENGTHS)})
    if out is not None:
        check_place(out, "the figures")  # before the work, not after it
    if figure is not None:
        require_bench_extra()
        check_place(figure, "the plot", option="--plot")
    target = load(options).target
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("Timing", total=1.0)
        curve = measure(
            target,
            rows=rows,
            lengths=lengths,
            seconds=seconds,
            progress=lambda share: progress.update(task, completed=share),
        )
    found = shares(curve, target)
    Console().print(table(curve, found))
    if found is not None:
        Console().print(found.describe())
    path = out or stored_at(describe(target))
    with writing("the figures to", path, "give another --out"):
        curve.save(path)
    errors.print(f"kept in {path}", soft_wrap=True)
    if figure is not None:
        plot(curve, figure)
        errors.print(f"drawn in {figure}", soft_wrap=True)


def table(curve: CostCurve, found: Shares | None = None) -> Table:
    """Rows down, lengths across: milliseconds, times one row, and what the limits' share of them is."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    machine = curve.machine
    threads = f", {machine['threads']} thread(s)" if machine.get("threads") else ""
    share = "" if found is None else "; the cores' limit, as a share of it"
    sheet = Table(
        title=f"{machine['model']}, {machine['dtype']}, {machine['device']}{threads}\nms a forward (x one row{share})",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    sheet.add_column("rows", justify="right")
    for length in curve.lengths:
        sheet.add_column(f"after {length:,}", justify="right")
    for number, count in enumerate(curve.rows):
        cells = []
        for length, times in enumerate(curve.seconds):
            share = "" if found is None else f"; {found.of[length][number]:.2f}"
            cells.append(f"{times[number] * 1e3:.2f} ({times[number] / times[0]:.2f}{share})")
        sheet.add_row(str(count), *cells)
    return sheet


def plot(curve: CostCurve, path: Path) -> None:
    """Plot the cost of a forward against its rows, relative to one row, with a line per length.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the file type.
    """
    from specdec.costs.plots import new_figure, require_bench_extra, scale_to_rows, tidy

    require_bench_extra()
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for length, times in zip(curve.lengths, curve.seconds, strict=True):
        axes.plot(curve.rows, [time / times[0] for time in times], marker="o", markersize=3, label=f"{length:,}")
    scale_to_rows(axes, curve.rows)
    title = f"{curve.machine['model']}, {curve.machine['dtype']}, {curve.machine['device']}"
    tidy(axes, title, "rows of the forward", "cost, in forwards of one row")
    axes.legend(title="tokens before", frameon=False)
    try:
        with replacing(path) as new:
            figure.savefig(new, dpi=150)
    except ValueError as error:
        raise ConfigError(f"cannot draw {path}: {error}; name a .png, .svg or .pdf") from error
