"""The commands ``specdec bench``, ``audit`` and ``compare``.

They are found through the entry point group ``specdec.commands``, and import torch only when they run.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from specdec.errors import ConfigError
from specdec.options import with_options

if TYPE_CHECKING:
    from specdec.bench.audit import Audit
    from specdec.bench.plan import Plan
    from specdec.bench.records import RunFolder

__all__ = ["audit", "bench", "compare"]

_MODEL, _SAMPLING = "Model", "Sampling"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a run; None where none was given."""

    questions: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Question file; tiny (in the package) or spec_bench (see --download)."),
    ] = None
    drafters: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Drafters; all: every one that needs no options (default all).")
    ] = None
    systems: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,C",
            help="Rivals: transformers, transformers_lookup, transformers_assisted, or an installed one; '' for none.",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="LABEL.OPTION=VALUE", help="Such as lookahead.window=5; repeatable."),
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML with options, such as configs/bench/tiny.yaml.")
    ] = None
    categories: Annotated[str | None, typer.Option(metavar="A,B,C", help="Only questions of these.")] = None
    limit: Annotated[int | None, typer.Option(help="Only so many questions, evenly from all categories.")] = None
    max_new_tokens: Annotated[int | None, typer.Option(help="Budget of each turn (default 96).")] = None
    format: Annotated[
        str | None, typer.Option(help="How turns become a prompt: auto, plain, chat or vicuna (default auto).")
    ] = None
    persistent: Annotated[
        bool | None, typer.Option("--persistent", help="Keep drafters for the whole run, with what they learned.")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="tiny, a folder, or a hub id (default tiny).", rich_help_panel=_MODEL)
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, ... (default auto).", rich_help_panel=_MODEL)
    ] = None
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.", rich_help_panel=_MODEL)] = None
    attention: Annotated[
        str | None, typer.Option(help="auto, sdpa or split (default auto).", rich_help_panel=_MODEL)
    ] = None
    optimize: Annotated[
        str | None, typer.Option(help="auto, or off: transformers' own layers (default auto).", rich_help_panel=_MODEL)
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="acceptance|cost|FILE|off",
            help="What bounds drafters' rows, see `specdec generate` (default acceptance).",
            rich_help_panel=_MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option(help="CPU threads (default torch's own; 1 for tiny).", rich_help_panel=_MODEL)
    ] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default 0).", rich_help_panel=_SAMPLING)] = (
        None
    )
    seed: Annotated[int | None, typer.Option(help="Of the sampling noise (default 0).", rich_help_panel=_SAMPLING)] = (
        None
    )
    acceptance: Annotated[
        str | None,
        typer.Option(
            help="match (same text under every drafter), reject, auto or typical (default match).",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    allow_lossy: Annotated[
        bool | None,
        typer.Option("--allow-lossy", help="Permit an acceptance that changes the text.", rich_help_panel=_SAMPLING),
    ] = None

    def plan(self, **fixed: Any) -> Plan:
        """Put together with the file and the defaults.

        Raises:
            ConfigError: an unknown option, or a value that cannot be.
        """
        from specdec.bench.plan import resolve_plan

        values = asdict(self)
        file, settings = values.pop("config"), values.pop("settings") or ()
        for name in ("drafters", "systems", "categories"):
            if values[name] is not None:
                values[name] = [part.strip() for part in values[name].split(",") if part.strip()]
        return resolve_plan(file, settings, values | fixed)


@with_options(PlanOptions)
def bench(
    options: PlanOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run's folder; one that was begun before goes on.")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="How often each question is answered (default 2).")] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch Spec-Bench's questions, and do nothing else.")
    ] = False,
    sha256: Annotated[str | None, typer.Option(metavar="SUM", help="Of the file that --download fetches.")] = None,
) -> None:
    """Compare drafters, and transformers' own decoding, on the same questions; audit the answers; write a report.

    With no options: every drafter on the embedded model and the questions in the package. The last line names the
    report.
    """
    if download:
        _download(sha256)
        return
    plan = options.plan(repeats=repeats)
    from specdec.bench.figures import require_bench_extra

    require_bench_extra()  # before the work, not after it
    folder = out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    command = shlex.join(["specdec", *sys.argv[1:]])
    run, found = _run(plan, folder, command)
    from specdec.bench.metrics import measure
    from specdec.bench.report import write_report
    from specdec.bench.tables import metrics_table, print_verdicts

    _print_failures(run)
    metrics = measure(run.records(), list(run.manifest()["systems"]))
    report = write_report(run, found, metrics)
    console = Console()
    console.print(metrics_table(metrics, found))
    print_verdicts(found, console, only_different=True)
    typer.echo(f"report: {report}")
    if not found.passed:
        raise typer.Exit(1)


@with_options(PlanOptions)
def audit(
    options: PlanOptions,
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run; without it, one is made.")
    ] = None,
) -> None:
    """Compare every answer with plain decoding, token by token; the exit status is 1 where one is wrong.

    RUN is a folder of `specdec bench`. Without it, the questions are answered once by each drafter, and not timed.
    """
    from specdec.bench.tables import print_verdicts

    if run is not None:
        given = [name for name, value in asdict(options).items() if value]
        if given:
            raise ConfigError(
                f"--{given[0].replace('_', '-')} is an option of a new run; leave it out, or leave out {run}"
            )
        found = _audit_folder(run)
    else:
        values: dict[str, Any] = {} if options.systems is not None or options.config is not None else {"systems": []}
        plan = options.plan(repeats=1, **values)
        with tempfile.TemporaryDirectory() as folder:
            made, found = _run(plan, Path(folder), "specdec audit", cost=False)
            _print_failures(made)
    print_verdicts(found, Console())
    if not found.passed:
        raise typer.Exit(1)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder of another run of the same model and questions.")],
    everything: Annotated[bool, typer.Option("--all", help="Also each category, and what did not move.")] = False,
) -> None:
    """Show two runs side by side, with what moved beyond noise."""
    from specdec.bench.compare import compare_runs
    from specdec.bench.records import RunFolder
    from specdec.bench.tables import comparison_table

    found = compare_runs(RunFolder(a), RunFolder(b))
    console = Console()
    console.print(comparison_table(found, everything))
    for note in found.notes:
        console.print(f"differs: {escape(note)}", soft_wrap=True)
    moved = sum(change.moved for change in found.changes)
    typer.echo(f"{moved} of {len(found.changes)} figures moved beyond noise")


def _download(sha256: str | None) -> None:
    from specdec.bench.download import download_spec_bench

    path, digest = download_spec_bench(sha256)
    typer.echo(f"{path}\nsha256 {digest}\nuse it with --questions spec_bench")


def _run(plan: Plan, folder: Path, command: str, *, cost: bool = True) -> tuple[RunFolder, Audit]:
    """Do a run with a progress bar, then audit it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers.utils import logging

    from specdec.bench.audit import audit as audit_records
    from specdec.bench.runner import Runner
    from specdec.target import TransformersTarget

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description:24.24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("")

        def on_system(label: str, answer: bool) -> None:
            progress.update(task, description=label, advance=int(answer))

        runner = Runner(plan, folder, command=command, on_system=on_system, cost=cost)
        progress.update(task, total=len(runner.todo))
        for name, reason in runner.manifest["left_out"].items():
            errors.print(f"left out {name}: {reason}", style="dim", soft_wrap=True, markup=False)
        if runner.resumed:
            errors.print(f"going on with {folder}: {runner.resumed} answers are there, {len(runner.todo)} to do")
        run = runner.run()
    target = runner.engine.target
    assert isinstance(target, TransformersTarget)
    return run, audit_records(run.records(), run.manifest()["systems"], target, plan.sampling())


def _audit_folder(path: Path) -> Audit:
    from transformers.utils import logging

    from specdec.bench.audit import audit as audit_records
    from specdec.bench.environment import describe_model
    from specdec.bench.plan import Plan
    from specdec.bench.records import RunFolder
    from specdec.bench.runner import load_engine
    from specdec.config import parse
    from specdec.target import TransformersTarget

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    run = RunFolder(path)
    manifest = run.manifest()
    plan = parse(Plan, manifest["plan"], where="bench")
    target = load_engine(plan).target
    assert isinstance(target, TransformersTarget)
    now = describe_model(plan.model, target)["fingerprint"]
    if now != manifest["model"]["fingerprint"]:
        raise ConfigError(
            f"the run was made with other weights of {plan.model!r} ({manifest['model']['fingerprint']}, now {now}); "
            "its answers cannot be audited with these"
        )
    return audit_records(run.records(), manifest["systems"], target, plan.sampling())


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
