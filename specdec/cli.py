"""The command line: ``specdec generate``, ``chat``, ``drafters``, ``demo``, ``info``, and what installed packages add.

Importing torch and transformers takes seconds, so commands import what they need of specdec when they run, and
``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from specdec import show
from specdec.config import ModelOptions, RunConfig, check_positive, resolve
from specdec.errors import ConfigError, PromptError, SpecdecError, SpecdecWarning, unknown
from specdec.info import info
from specdec.options import Given, with_options
from specdec.pull import pull
from specdec.version import __version__

if TYPE_CHECKING:
    from specdec.engine import Engine, Prompt
    from specdec.results import Chunk, Generation

__all__ = ["COMMANDS", "build", "main"]

COMMANDS = "specdec.commands"
"""Entry point group of further commands."""

with_run_options = with_options(RunConfig, file="configs/drafter/lookahead.yaml", setting="lookahead.window=15")


def main(arguments: list[str] | None = None) -> int:
    """Run a command line, ``sys.argv`` by default; returns its exit status.

    An expected error is one line, and 2; a warning of ours is one line too, without the place in the source.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            status: int | None = build()(arguments, standalone_mode=False, prog_name="specdec")
        return status or 0
    except (SpecdecError, typer.TyperException) as error:
        _print_error(error)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130


def build() -> typer.Typer:
    """The application: the commands below, and those that installed packages declare as entry points.

    Such an entry point is a function, which becomes a command of that name, or a Typer app, which becomes a group.
    """
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (generate, chat, drafters, demo, info, pull):
        app.command()(command)
    for entry in entry_points(group=COMMANDS):
        try:
            found = entry.load()
        except Exception as error:  # code of others: it may raise anything, and the other commands still work
            found = _broken(entry, error)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=entry.name)
        else:
            app.command(entry.name)(found)
    return app


def _broken(entry: EntryPoint, error: Exception) -> Callable[[], None]:
    def tell() -> None:
        raise ConfigError(
            f"command {entry.name!r} is registered as {entry.value!r}, which does not import: "
            f"{type(error).__name__}: {error}; reinstall the package that provides it"
        )

    tell.__doc__ = f"Cannot run: {type(error).__name__}."
    return tell


def _print_error(error: Exception) -> None:
    message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    if message:  # without a command there is help, and nothing to add to it
        _print_line(("error:", "bold red"), message)


def _show_warning(former: Callable[..., None], message: Warning | str, category: type[Warning], *rest: Any) -> None:
    """Shows a warning of ours; one of others goes the way that it went before."""
    if issubclass(category, SpecdecWarning):
        _print_line(("warning:", "yellow"), str(message))
    else:
        former(message, category, *rest)


def _print_line(kind: tuple[str, str], message: str) -> None:
    Console(stderr=True).print(Text.assemble(kind, " ", " ".join(message.split())), soft_wrap=True)


def _decode(engine: Engine, run: RunConfig, prompt: Prompt, on_chunk: Callable[[Chunk], None]) -> Generation:
    decoding = engine.start(prompt, run.max_new_tokens, run.sampling, stop=run.stop, stream=True)
    for chunk in decoding.chunks():
        on_chunk(chunk)
    return decoding.result()


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


@with_run_options
def generate(
    given: Given,
    prompt: Annotated[str | None, typer.Argument(help="Text to go on from.", show_default=False)] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read the prompt from a file; - is standard input.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes, or at the end.")] = True,
) -> None:
    """Go on from a prompt: the text on standard output, a line of statistics on standard error.

    On a terminal, the tokens of one step share a colour; tokens without one came singly, from a plain step.
    """
    from specdec.load import load_run

    config = resolve(RunConfig, given)
    text = _read_prompt(prompt, prompt_file)
    engine = load_run(config)
    painter = show.StepPainter(Console())
    live = stream and not as_json
    generation = _decode(engine, config, text, painter if live else lambda chunk: None)
    if as_json:
        typer.echo(json.dumps(show.to_json(generation, engine.drafter.name)))
        return
    if not live:
        painter.write(generation.text)
    painter.end()
    Console(stderr=True).print(show.statistics(generation, engine.drafter.name), soft_wrap=True)


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if prompt is not None and file is not None:
        raise PromptError(f"a prompt and --prompt-file {file!r} were given; give one of them")
    if prompt is None and file is None:
        raise PromptError("no prompt was given; write one, or --prompt-file FILE (- is standard input)")
    try:
        if file is not None:
            prompt = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        assert prompt is not None
        prompt.encode("utf-8")  # an argument's stray bytes come as surrogates, which no tokenizer takes
    except OSError as error:
        raise PromptError(f"cannot read the prompt file {file!r}: {error.strerror}") from error
    except UnicodeError as error:
        raise PromptError(f"the prompt is no UTF-8 text: {error}; convert it") from error
    return prompt


@with_run_options
def chat(
    given: Given,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told at the start.")] = None,
) -> None:
    """Talk with a model, a line at a time; /reset starts anew and /exit ends it.

    The tokenizer's chat template makes the prompt. The whole talk has to fit the model's context.
    """
    from specdec.load import load_run

    config = resolve(RunConfig, given)
    engine = load_run(config)
    painter, errors = show.StepPainter(Console()), Console(stderr=True)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    for line in _lines(interactive):
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        if line.startswith("/") and line[1:].isalpha():
            _print_error(ConfigError(unknown("command", line, ["/exit", "/reset"])))
            continue
        question = {"role": "user", "content": line}
        try:
            generation = _decode(engine, config, [*messages, question], painter)
        except PromptError as error:
            if not interactive:
                raise
            _print_error(PromptError(f"{error}, or begin anew with /reset"))
            continue
        typer.echo()
        messages += [question, {"role": "assistant", "content": generation.text}]
        errors.print(show.statistics(generation, engine.drafter.name), soft_wrap=True)


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, line by line, without empty lines."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte is no reason to end a talk
    if not interactive:
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and editing)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        if line:
            yield line


def drafters(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the registered drafters with their options; set one with --set DRAFTER.OPTION=VALUE."""
    from specdec.registry import drafter_names, drafter_type

    found: list[show.Description] = []
    for name in drafter_names():
        try:
            found.append(show.describe(name, drafter_type(name)))
        except SpecdecError as error:
            found.append(show.Description(name, error=str(error)))
    if as_json:
        typer.echo(json.dumps([asdict(drafter) for drafter in found], indent=2))
    else:
        Console().print(show.drafter_list(found))


def demo(
    names: Annotated[
        str, typer.Option("--drafters", metavar="A,B,C", help="Drafters to compare; plain decoding always runs.")
    ] = "none,prompt_lookup,lookahead,auto",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that each drafter writes.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy, and lets so small a model fall into loops.")] = 0.7,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch (default 1).")] = None,
) -> None:
    """Watch the embedded model write the same text under several drafters, and see what each step brought.

    On a terminal, the tokens of one step share a colour; tokens without one came singly, from a plain step.
    """
    from rich.progress import track

    from specdec.demo import PROMPT, ROUNDS, Race
    from specdec.load import load
    from specdec.params import SamplingParams

    check_positive(max_new_tokens=max_new_tokens)
    sampling = SamplingParams(temperature=temperature)
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    engine = load(ModelOptions(threads=threads))
    race = Race(engine, chosen, max_new_tokens=max_new_tokens, sampling=sampling)
    console, errors = Console(), Console(stderr=True)
    painter = show.StepPainter(console)
    painter.write(f"{PROMPT}\n", "dim")
    for name in race.engines:
        painter.write(f"\n--- {name} ---\n", "bold")
        race.show(name, painter)
        painter.write("\n")
    again = race.results * ROUNDS  # in turn, so that a busy moment of the machine is shared by all
    hidden = not errors.is_terminal
    for result in track(again, "Timing", auto_refresh=False, console=errors, transient=True, disable=hidden):
        race.time(result)
    painter.write("\n")
    note = f"temperature {temperature:g}, one seed; tokens/s: the median of {ROUNDS} runs, taken in turn"
    console.print(show.race_table(race.results, note))
