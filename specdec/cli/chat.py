"""``specdec chat``: a talk with a model, whose cache is kept from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specdec.cli import output
from specdec.engine.config import RunConfig, resolve
from specdec.errors import ConfigError, PromptError, unknown
from specdec.settings.options import Given, option, with_options
from specdec.settings.validation import AtLeast1

if TYPE_CHECKING:
    from specdec.engine.engine import Engine
    from specdec.engine.prefix_cache import PrefixCache
    from specdec.results import Generation

__all__ = ["ChatConfig", "chat"]

Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class ChatConfig(RunConfig):
    """A run's options, with defaults for talking."""

    drafter: str | dict[str, object] = option("auto", "The drafter; see `specdec drafters`.", metavar="NAME")
    max_new_tokens: AtLeast1 = option(1024, "Most new tokens of an answer.")
    chat_template: str | None = option(
        None, "The chat template: a file, or chatml, llama3, mistral (default: the model's).", metavar="FILE|NAME"
    )


@with_options(ChatConfig, without=["parallel"], file="configs/drafter/lookahead.yaml", setting="lookahead.window=15")
def chat(
    given: Given,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told at the start.")] = None,
) -> None:
    """Talk with a model, a line at a time; /reset starts anew, /exit ends it, Ctrl-C ends an answer.

    The tokenizer's chat template makes the prompt. What the last turn and this one begin with is not run again. The
    whole talk has to fit the model's context. On a terminal, the tokens of one step share a colour.
    """
    from specdec.engine.load import load_run
    from specdec.engine.prefix_cache import PrefixCache

    if sys.stdin is None:
        raise ConfigError("a talk is read from standard input, which is closed; use `specdec generate` for one prompt")
    config = resolve(ChatConfig, given)
    engine, kept = load_run(config), PrefixCache()
    opening: Messages = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    for line in _lines(interactive):
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            continue
        if line.startswith("/") and line[1:].isalpha():
            output.print_error(ConfigError(unknown("command", line, ["/exit", "/reset"])))
            continue
        question = {"role": "user", "content": line}
        try:
            text = _answer(engine, config, [*messages, question], kept, interactive)
        except PromptError as error:
            if not interactive:
                raise
            output.print_error(PromptError(f"{error}, or begin anew with /reset"))
            continue
        if text:  # a question whose answer was ended before it began is dropped
            messages += [question, {"role": "assistant", "content": text}]


def _answer(engine: Engine, config: ChatConfig, prompt: Messages, kept: PrefixCache, interactive: bool) -> str:
    """Stream an answer; in an interactive chat Ctrl-C ends it. Returns the text shown, as the content of a message."""
    from specdec.engine.text_stream import as_content

    decoding = engine.start(
        prompt, config.max_new_tokens, config.sampling, **config.stops, prefix_cache=kept, stream=True
    )
    painter, parts = output.StepPainter(Console()), list[str]()
    try:
        for chunk in decoding.chunks():
            painter(chunk)
            parts.append(chunk.text)
    except KeyboardInterrupt:
        if not interactive:
            raise
    typer.echo()
    Console(stderr=True).print(_costs(decoding.result(), engine.drafter.name), soft_wrap=True, style="dim")
    return as_content("".join(parts), engine.tokenizer, decoding.result().token_ids)


def _costs(generation: Generation, drafter: str) -> str:
    """The line of statistics, with the number of prompt tokens that were run."""
    stats = generation.stats
    run = stats.prompt_tokens - stats.reused_tokens
    line = output.statistics(generation, drafter).plain.replace("ended by unfinished", "ended by you")
    return f"{line}; read {run} of {stats.prompt_tokens} prompt tokens in {stats.seconds.prefill:.2f} s"


def _lines(interactive: bool) -> Iterator[str]:
    """The user's lines, without empty ones."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte is no reason to end a talk
    if not interactive:
        yield from filter(None, (line.lstrip("\ufeff").strip() for line in sys.stdin))  # a file's mark is no word
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and editing)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo("\n/exit or Ctrl-D ends the talk")
            continue
        if line:
            yield line
