"""``specdec info``: how a model would be run on this machine, why, and how fast each runner is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.engine.config import ModelOptions, resolve
from specdec.settings.options import Given, with_options

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["info", "sections_table", "times_table"]

_TIMED_ROWS = (1, 8)  # a plain step, and a small tree

Times = Mapping[str, "Mapping[str, float] | str"]
"""Runner -> seconds of a step by its rows, or why it cannot run."""


@with_options(ModelOptions)
def info(
    given: Given,
    time: Annotated[bool, typer.Option("--time", help="Time a step of every runner, side by side.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what would run a model on this machine, and why."""
    from rich.console import Console

    from specdec.engine.load import load, model_arguments, prepare

    options = resolve(ModelOptions, given)
    sections: dict[str, Any] = load(options).describe()
    times: Times = {}
    if time:
        prepare(options)
        with Console(stderr=True).status("Timing the runners"):
            times = time_runners(options.model, **model_arguments(options))
    if as_json:
        typer.echo(json.dumps({**sections, "times": times} if time else sections, indent=2, default=str))
        return
    console = Console()
    console.print(sections_table(sections))
    if time:
        console.print(times_table(times))


def time_runners(path: str, **options: Any) -> Times:
    """Seconds of whole steps of every runner.

    ``options``: those of :meth:`TransformersTarget.from_pretrained` without ``execution``.
    """
    from specdec.costs.measuring import measure
    from specdec.errors import ConfigError, TargetError
    from specdec.models.transformers_target import TransformersTarget
    from specdec.runners import EXECUTIONS

    found: dict[str, Mapping[str, float] | str] = {}
    for name in EXECUTIONS[1:]:
        try:
            target = TransformersTarget.from_pretrained(path, **{**options, "execution": name})
        except (ConfigError, TargetError) as error:
            found[name] = str(error)
            continue
        curve = measure(target, rows=_TIMED_ROWS, lengths=(256,), seconds=2.0)
        found[name] = {str(rows): seconds for rows, seconds in zip(curve.rows, curve.seconds[0], strict=True)}
    return found


def sections_table(sections: Mapping[str, Mapping[str, Any]]) -> Table:
    """Section, name and value, a row each; a section is named once."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, values in sections.items():
        for number, (name, value) in enumerate(values.items()):
            table.add_row(Text(section if number == 0 else ""), Text(name), Text(_shown(value)))
    return table


def _shown(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def times_table(times: Times) -> Table:
    """A row per runner: milliseconds of a step by its rows and times the fastest, or why it cannot run."""
    from rich.table import Table
    from rich.text import Text

    measured = {runner: timing for runner, timing in times.items() if not isinstance(timing, str)}
    rows = list(dict.fromkeys(count for seconds in measured.values() for count in seconds))
    best = {count: min(seconds[count] for seconds in measured.values() if count in seconds) for count in rows}
    title = "ms a step (x the fastest)"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("runner", no_wrap=True)
    for count in rows:
        table.add_column(f"{count} row" if count == "1" else f"{count} rows", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for runner, timing in times.items():
        seconds = measured.get(runner, {})
        cells = [f"{seconds[n] * 1e3:.2f} ({seconds[n] / best[n]:.2f})" if n in seconds else "" for n in rows]
        table.add_row(Text(runner), *cells, Text("" if seconds else str(timing)))
    return table
