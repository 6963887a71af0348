"""The commands ``specdec bench``, ``audit`` and ``compare``.

They are found through the entry point group ``specdec.commands``, and import torch only when they run.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specdec.bench.plan import Plan, Spec, labelled
from specdec.engine.config import resolve
from specdec.errors import ConfigError
from specdec.settings.options import Given, with_options
from specdec.settings.parsing import parse

if TYPE_CHECKING:
    from specdec.bench.audit import Audit
    from specdec.bench.records import RunFolder

__all__ = ["audit", "bench", "compare"]

# Columns that fit in 80 characters.
SHOWN = ("tokens/step", "rows/step", "tokens/s", "x plain (95 %)", "x transformers")
SHOWN_OF_BATCHES = ("tokens/s", "x plain", "first token ms, p95", "between ms, p95", "rest us")

_LEFT = ("system", "questions", "figure", "text", "moved")
_STYLES = {"BUG": "bold red", "up": "green", "down": "red"}  # of a row's last cell


@with_options(Plan, file="configs/bench/tiny.yaml", setting="lookahead.window=5")
def bench(
    given: Given,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; one that was begun before goes on.")
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=NAME:FOLDER", help="A drafter with weights of yours, in place of --drafters or beside it."
        ),
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch Spec-Bench's questions, and do nothing else.")
    ] = False,
) -> None:
    """Compare drafters, and transformers' own decoding, on the same questions; audit the answers; write a page.

    With no options: every drafter on the embedded model and the questions in the package. The last line names the page.
    """
    if download:
        from specdec.bench.spec_bench import download_spec_bench

        path, digest = download_spec_bench()
        typer.echo(f"{path}\nsha256 {digest}\nuse it with --questions spec_bench")
        return
    if drafter:
        own: list[Spec] = [labelled(text) for text in drafter]
        given = replace(given, values={**given.values, "drafters": [*given.values.get("drafters", ()), *own]})
    plan = resolve(Plan, given, where="bench")
    from specdec.costs.plots import require_bench_extra

    require_bench_extra()  # before the work, not after it
    folder = out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    command = shlex.join(["specdec", *sys.argv[1:]])
    run, verdicts = _run(plan, folder, command)
    from specdec.bench.metrics import measure
    from specdec.bench.report import write_report
    from specdec.bench.tables import system_table

    _print_failures(run)
    metrics = measure(run.records(), list(run.manifest()["systems"]))
    report = write_report(run, verdicts, metrics)
    console = Console()
    texts = {label: verdict.brief for label, verdict in verdicts.systems.items()}
    console.print(terminal_table(system_table(metrics.one_by_one(), SHOWN, texts=texts)))
    if len(plan.sizes) > 1:
        console.print(terminal_table(system_table(metrics, SHOWN_OF_BATCHES, texts=texts)))
    print_verdicts(verdicts, console, only_different=True)
    typer.echo(f"report: {report}")
    if not verdicts.passed:
        raise typer.Exit(1)


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of `specdec bench`.")],
) -> None:
    """Compare every answer of a run with plain decoding, token by token.

    The exit status is 1 where one is wrong or a drafter has none, and 2 where there was nothing to compare.
    """
    from specdec.bench.audit import audit as audit_records
    from specdec.bench.environment import describe_model
    from specdec.bench.records import RunFolder
    from specdec.engine.load import load

    folder = RunFolder(run)
    manifest = folder.manifest()
    plan = parse(Plan, manifest["plan"], where="bench")
    target = load(plan).target
    now = describe_model(plan.model, target)["fingerprint"]
    if now != manifest["model"]["fingerprint"]:
        raise ConfigError(
            f"the run was made with other weights of {plan.model!r} ({manifest['model']['fingerprint']}, now {now}); "
            "its answers cannot be audited with these"
        )
    verdicts = audit_records(folder.records(), manifest["systems"], target, plan.sampling())
    print_verdicts(verdicts, Console())
    typer.echo(str(verdicts))
    if not verdicts.compared:
        raise ConfigError(
            f"nothing could be compared in {str(run)!r}: no answer has one of plain decoding beside it; look at the "
            "errors in its answers.jsonl, and bench other questions or systems"
        )
    if not verdicts.passed:
        raise typer.Exit(1)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of another run of the same model and questions.")],
    everything: Annotated[bool, typer.Option("--all", help="Also each category, and what did not move.")] = False,
) -> None:
    """Show two runs side by side, with what moved beyond noise."""
    from specdec.bench.compare import compare_runs
    from specdec.bench.records import RunFolder

    comparison = compare_runs(RunFolder(a), RunFolder(b))
    console = Console()
    console.print(terminal_table(comparison.cells(everything)))
    for note in comparison.notes:
        console.print(f"differs: {escape(note)}", soft_wrap=True)
    moved = sum(change.moved for change in comparison.changes)
    rests = f"on {comparison.answered} of {comparison.asked} questions"
    typer.echo(f"{moved} of {len(comparison.changes)} figures moved beyond noise, {rests}")


def terminal_table(cells: list[list[str]]) -> Table:
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


def _run(plan: Plan, folder: Path, command: str) -> tuple[RunFolder, Audit]:
    """Do a run with a progress bar, then audit it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from specdec.bench.audit import audit as audit_records
    from specdec.bench.runner import Runner

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description:24.24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    task = progress.add_task("")

    def on_system(label: str, answers: int) -> None:
        progress.update(task, description=label, advance=answers)

    runner = Runner(plan, folder, command=command, on_system=on_system)
    if runner.follows:
        runner.follow()
        raise typer.Exit
    left = sum(len(asked) for _, asked, _ in runner.todo)
    progress.update(task, total=left)
    for name, reason in runner.manifest["left_out"].items():
        errors.print(f"left out {name}: {reason}", style="dim", soft_wrap=True, markup=False)
    if runner.resumed:
        errors.print(f"going on with {folder}: {runner.resumed} answers are there, {left} to do")
    with progress:
        run = runner.run()
    return run, audit_records(run.records(), run.manifest()["systems"], runner.target, plan.sampling())


def _print_failures(run: RunFolder) -> None:
    """Raises ConfigError where nothing was answered at all."""
    records = run.records()
    failed = [record for record in records if record.error is not None]
    if failed and len(failed) == len(records):
        raise ConfigError(f"all {len(failed)} answers failed; the first: {failed[0].error}")
    if failed:
        first = f"{failed[0].system}, question {failed[0].question_id}: {failed[0].error}"
        Console(stderr=True).print(
            f"{len(failed)} of {len(records)} answers failed; the first: {first}", soft_wrap=True, markup=False
        )
