"""The command line: ``specdec generate``, ``chat``, ``drafters``, ``demo``, ``info``, and commands of other packages.

Importing torch and transformers takes seconds, so commands import the rest of specdec when they run; ``--help`` and a
mistyped option answer at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from specdec.cli import output as output_module
from specdec.cli.chat import chat
from specdec.cli.info import info
from specdec.cli.quantize import quantize
from specdec.cli.serve import serve
from specdec.engine.config import ModelOptions, RunConfig, resolve
from specdec.errors import ConfigError, PromptError, SpecdecError, SpecdecWarning, shown
from specdec.models.pull import pull
from specdec.settings.files import decoded, refuse_existing
from specdec.settings.options import Given, with_options
from specdec.settings.parsing import check_positive
from specdec.version import __version__

__all__ = ["COMMANDS", "build", "main"]

COMMANDS = "specdec.commands"
"""Entry point group of further commands."""

# Errors of writing files are other classes, so these errors come from standard output or standard error.
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}

_EXAMPLES = {"file": "configs/drafter/lookahead.yaml", "setting": "lookahead.window=15"}


def main(arguments: list[str] | None = None) -> int:
    """Run a command line, ``sys.argv`` by default; returns its exit status.

    An expected error is one line, and 2, as is an output that takes no more; a warning of ours is one line too, without
    the place in the source. Of several processes that decode together, only rank 0 prints, and others where something
    that they met went wrong.
    """
    try:
        _replace_what_cannot_be_shown()
        with warnings.catch_warnings(), redirect_stdout(sys.stdout), redirect_stderr(sys.stderr):
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            status: int | None = build()(arguments, standalone_mode=False, prog_name="specdec")
            if sys.stdout is not None:
                sys.stdout.flush()  # now, as an error at Python's exit could not be reported
        return status or 0
    except (SpecdecError, typer.TyperException) as error:
        if not (_follows() and isinstance(error, ConfigError | PromptError | typer.TyperException)):
            _tell(error)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _tell(SpecdecError(f"cannot write the output: {error}; make room, or send it elsewhere"))
        return 2


def _replace_what_cannot_be_shown() -> None:
    """Have a character that the terminal's encoding lacks come out as a replacement character, where it would raise.

    The bytes of a file's name that are no UTF-8 still go out as they are.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            raw = stream.errors == "surrogateescape" and stream.encoding.lower().replace("-", "") == "utf8"
            if stream.errors in ("strict", "surrogateescape") and not raw:
                stream.reconfigure(errors="replace")


def _tell(error: Exception) -> None:
    """Shows an error, and lets go of what could not be written, which Python would try once more at its end."""
    with suppress(OSError):
        output_module.print_error(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _follows() -> bool:
    """Whether rank 0 says what there is to say."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_rank() > 0


def build() -> typer.Typer:
    """The application: the commands below, and commands that installed packages declare as entry points.

    An entry point is a function, which becomes a command of that name, or a Typer app, which becomes a group.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (generate, chat, drafters, demo, info, pull, serve, quantize):
        app.command()(command)
    for entry in entry_points(group=COMMANDS):
        try:
            command = entry.load()
        except Exception as error:  # code of others: it may raise anything, and the other commands still work
            command = _broken(entry, error)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(entry.name)(command)
    return app


def _broken(entry: EntryPoint, error: Exception) -> Callable[[], None]:
    def tell() -> None:
        raise ConfigError(
            f"command {entry.name!r} is registered as {entry.value!r}, which does not import: "
            f"{type(error).__name__}: {error}; reinstall the package that provides it"
        )

    tell.__doc__ = f"Cannot run: {type(error).__name__}."
    return tell


def _show_warning(former: Callable[..., None], message: Warning | str, category: type[Warning], *rest: Any) -> None:
    """Shows a warning of ours; one of others goes the way that it went before."""
    if issubclass(category, SpecdecWarning):
        output_module.print_line(("warning:", "yellow"), str(message))
    else:
        former(message, category, *rest)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specdec {__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Speculative decoding that does not change what the model says."""


@with_options(RunConfig, **_EXAMPLES)
def generate(
    given: Given,
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from.", show_default=False)] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read the prompt from a file; - is standard input.")
    ] = None,
    prediction: Annotated[
        str | None, typer.Option(metavar="FILE", help="A text that the answer will mostly be; it is drafted from.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes, or at the end.")] = True,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer a file of prompts, JSON lines; needs --out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the answers go, JSON lines; resumes where it was.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Of a file's prompts, how many are answered at once (default 8).")
    ] = None,
) -> None:
    """Go on from a prompt: the text on standard output, a line of statistics on standard error.

    On a terminal, the tokens of one step share a colour; tokens without one came singly, from a plain step.
    """
    from specdec.engine.load import load_run

    config = resolve(RunConfig, given)
    if prompts is not None or out is not None:
        if as_json or not stream:
            raise ConfigError(
                "--json and --no-stream are of a prompt alone; --out FILE gets JSON lines, so leave them out"
            )
        _answer_file(config, prompts, out, 8 if batch is None else batch, one=prompt or prompt_file or prediction)
        return
    if batch is not None:
        raise ConfigError(f"--batch {batch} is of many prompts; give --prompts FILE and --out FILE, or leave it out")
    if prediction == prompt_file == "-":
        raise PromptError("prompt and prediction are both to come from standard input; give a file for one of them")
    text = _read_prompt(prompt, prompt_file)
    predicted = None if prediction is None else _read_file("prediction", prediction)
    engine = load_run(config)
    painter = output_module.StepPainter(Console())
    live = stream and not as_json
    decoding = engine.start(
        text, config.max_new_tokens, config.sampling, **config.stops, prediction=predicted, stream=True
    )
    for chunk in decoding.chunks():
        if live:
            painter(chunk)
    generation = decoding.result()
    if as_json:
        typer.echo(json.dumps(output_module.to_json(generation, engine.drafter.name)))
        return
    if not live:
        painter.write(generation.text)
    painter.end()
    Console(stderr=True).print(output_module.statistics(generation, engine.drafter.name), soft_wrap=True)


def _answer_file(config: RunConfig, prompts: Path | None, out: Path | None, batch: int, *, one: str | None) -> None:
    if prompts is None or out is None or one is not None:
        raise ConfigError("--prompts FILE and --out FILE go together, and without another prompt or a prediction")
    check_positive(batch=batch)
    from specdec.cli.answer_file import answer, read_prompts
    from specdec.engine.load import load_run

    refuse_existing(out)
    questions = read_prompts(prompts)
    failed = answer(load_run(config), questions, out, config, batch=batch, progress=sys.stderr.isatty())
    failures = f", {failed} of them failures" if failed else ""
    Console(stderr=True).print(f"{len(questions)} answers{failures}: {out}", soft_wrap=True, highlight=False)


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise PromptError(f"a prompt and --prompt-file {shown(file)} were given; give one of them")
    if file is not None:
        return _read_file("prompt", file)
    if prompt is None:
        raise PromptError("no prompt was given; write one, or --prompt-file FILE (- is standard input)")
    try:
        prompt.encode("utf-8")  # an argument's stray bytes come as surrogates, which no tokenizer takes
    except ValueError as error:
        raise PromptError(f"the prompt is no UTF-8 text: {error}; convert it") from error
    return prompt


def _read_file(what: str, file: str) -> str:
    """The text of a prompt's or a prediction's file; ``-`` is standard input."""
    if file == "-" and sys.stdin is None:
        raise PromptError(f"the {what} is to come from standard input, which is closed; give it, or a file of it")
    try:
        return decoded(_standard_input() if file == "-" else Path(file).read_bytes())
    except OSError as error:
        raise PromptError(f"cannot read the {what} file {shown(file)}: {error.strerror}") from error
    except ValueError as error:
        raise PromptError(f"the {what} is no UTF-8 text: {error}; convert it") from error


def _standard_input() -> bytes:
    return sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()


def drafters(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    check: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Say what trained weights these are, for which model.")
    ] = None,
) -> None:
    """List the registered drafters with their options; set one with --set DRAFTER.OPTION=VALUE."""
    from specdec.drafting.registry import describe_weights, drafter_names, drafter_type

    if check is not None:
        name, lines = describe_weights(check)
        typer.echo(json.dumps({"drafter": name, "about": lines}, indent=2) if as_json else "\n".join(lines))
        return
    drafters: list[dict[str, Any]] = []
    for name in drafter_names():
        try:
            drafters.append(output_module.describe(name, drafter_type(name)))
        except SpecdecError as error:
            drafters.append({"name": name, "summary": "", "options": [], "error": str(error)})
    if as_json:
        typer.echo(json.dumps(drafters, indent=2))
    else:
        Console().print(output_module.drafter_list(drafters))


def demo(
    names: Annotated[
        str, typer.Option("--drafters", metavar="A,B,C", help="Drafters to compare; plain decoding always runs.")
    ] = "none,prompt_lookup,lookahead,auto",
    model: Annotated[
        str | None, typer.Option(help="A model with a chat template, or tiny (default smollm2 where it was pulled).")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that each drafter writes in each turn.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy (default 0; 0.7 for tiny, which falls into loops).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch (default 1).")] = None,
) -> None:
    """Watch a conversation under several drafters side by side, and see what each step brought.

    On a terminal, the tokens of one step share a colour; tokens without one came singly, from a plain step.
    """
    from specdec.cli.race import Panes, Race, model_at_hand, question_for
    from specdec.drafting.registry import parse_drafter
    from specdec.engine.load import load
    from specdec.engine.questions import build_prompt
    from specdec.settings.sampling_params import SamplingParams

    check_positive(max_new_tokens=max_new_tokens)
    chosen, why = model_at_hand() if model is None else (model, None)
    small = chosen == "tiny"
    sampling = SamplingParams(temperature=(0.7 if small else 0.0) if temperature is None else temperature)
    console = Console()
    painter = output_module.StepPainter(console)
    drafters = [name.strip() for name in names.split(",") if name.strip()]
    options = ModelOptions(model=chosen, threads=1 if threads is None else threads)
    for name in drafters:
        parse_drafter(name)  # before a model is loaded for nothing
    if why is not None:
        Console(stderr=True).print(f"Showing the embedded model instead: {why}", style="yellow", soft_wrap=True)
    engine = load(options)
    race = Race(engine, drafters, max_new_tokens=max_new_tokens, sampling=sampling)
    race.warm_up()
    question, answers = question_for(chosen), list[str]()
    for turn in question.turns:
        prompt = build_prompt(question, answers, "auto", engine.tokenizer)
        painter.write(f"{'' if small else '> '}{turn}\n\n", "dim")
        if console.is_terminal:
            with Panes(console, [lane.name for lane in race.lanes]) as panes:
                answers.append(race.turn(prompt, panes))
        else:
            answers.append(race.turn(prompt))
            for lane in race.lanes:
                painter.write(f"--- {lane.name} ---\n{lane.generations[-1].text}\n\n")
    for _ in range(2 if small else 0):  # its answers are so short that one measurement says little
        race.turn(build_prompt(question, [], "auto", engine.tokenizer))
    note = f"{chosen}, temperature {sampling.temperature:g}; tokens/s of decoding alone, steps taken in turn"
    console.print(race.table(note))
