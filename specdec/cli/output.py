"""Output of the command line: streams with a colour per step, a line of statistics, tables."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from itertools import cycle
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from specdec.results import Chunk, Generation, Statistics

__all__ = [
    "COLOURS",
    "PICTURES",
    "StepPainter",
    "describe",
    "drafter_list",
    "print_error",
    "print_line",
    "statistics",
    "to_json",
]

# Of middling brightness, so that they read on a dark and on a light ground; neighbours are far apart in hue.
COLOURS = ("dodger_blue1", "dark_orange3", "green4", "medium_orchid3")

# A model's text may hold escape sequences; a terminal gets to see their pictures and not to obey them.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class StepPainter:
    """Writes a stream as it comes. On a terminal the tokens of one step share a colour; a plain step has none.

    Elsewhere it writes the text and nothing else.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colours = cycle(COLOURS)

    def __call__(self, chunk: Chunk) -> None:
        speculated = chunk.step is not None and len(chunk.step.tokens) > 1
        self.write(chunk.text, next(self._colours) if speculated else None)

    def write(self, text: str, style: str | None = None) -> None:
        if self._console.is_terminal:
            self._console.out(text.translate(PICTURES), style=style, end="", highlight=False)
        else:
            self._console.file.write(text)
        self._console.file.flush()

    def end(self) -> None:
        """Leave the text's last line on a terminal, and where standard error is written to the same file."""
        if self._console.is_terminal or _is_standard_error(self._console.file):
            self._console.file.write("\n")
            self._console.file.flush()


def _is_standard_error(file: IO[str]) -> bool:
    try:
        return os.path.sameopenfile(file.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # one of them is no file of the system's, or closed
        return False


def statistics(generation: Generation, drafter: str) -> Text:
    """One line with the statistics of a text, and whether it is lossy."""
    stats = generation.stats
    name = Text(drafter)
    if generation.lossy:
        name.append(" (lossy: not the target's distribution)", style="bold red")
    if stats.activations is not None:
        name.append(f" (activations in {stats.activations})")
    return Text.assemble(
        name,
        f": {_count(stats.new_tokens, 'token')} in {_count(stats.steps, 'target step')}, "
        f"{stats.tokens_per_step:.2f} per step, {stats.tokens_per_second:.0f} tokens/s; "
        f"{_predicted(stats)}ended by {generation.finish_reason}",
        style="dim",
    )


def _predicted(stats: Statistics) -> str:
    accepted, rejected = stats.accepted_prediction_tokens, stats.rejected_prediction_tokens
    return f"{accepted} of {_count(accepted + rejected, 'predicted token')} came; " if accepted + rejected else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def to_json(generation: Generation, drafter: str) -> dict[str, Any]:
    """A generation as plain values, for ``json.dumps``."""
    stats = generation.stats
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "lossy": generation.lossy,
        "activations": stats.activations,
        "drafter": drafter,
        "stats": {
            "prompt_tokens": stats.prompt_tokens,
            "reused_tokens": stats.reused_tokens,
            "accepted_prediction_tokens": stats.accepted_prediction_tokens,
            "rejected_prediction_tokens": stats.rejected_prediction_tokens,
            "new_tokens": stats.new_tokens,
            "steps": stats.steps,
            "acceptance_lengths": stats.acceptance_lengths,
            "tokens_per_step": stats.tokens_per_step,
            "tokens_per_second": stats.tokens_per_second,
            "rows_per_step": stats.rows_per_step,
            "seconds": asdict(stats.seconds),
        },
        **({} if generation.error is None else {"error": f"{type(generation.error).__name__}: {generation.error}"}),
    }


def describe(name: str, kind: Any) -> dict[str, Any]:
    """The description of a drafter class for ``specdec drafters``: its docstring's first line and its options.

    An option's ``default`` is the repr of its default, None if the option is required.
    """
    about = _attributes(kind.Config)
    options = [
        {"name": f.name, "type": str(f.type), "default": _default(f), "help": about.get(f.name, "")}
        for f in fields(kind.Config)
        if f.init
    ]
    summary = (inspect.getdoc(kind) or "").partition("\n")[0]
    return {"name": name, "summary": summary.replace("``", ""), "options": options, "error": None}


def _default(field: Any) -> str | None:
    if field.default is not MISSING:
        return repr(field.default)
    return None if field.default_factory is MISSING else repr(field.default_factory())


def _attributes(config: Any) -> dict[str, str]:
    """Field -> text, from the Attributes section of a docstring; ``a, b: text`` describes both fields."""
    _, _, section = (inspect.getdoc(config) or "").partition("Attributes:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    about: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + section):
        names, _, text = entry.strip().partition(": ")
        about |= dict.fromkeys(names.split(", "), " ".join(text.replace("``", "").split()))
    return about


def drafter_list(drafters: Sequence[Mapping[str, Any]]) -> Group:
    """The description of each drafter with a table of its options; ``error`` is the reason why one does not import."""
    names = [len(option["name"]) for drafter in drafters for option in drafter["options"]]
    parts: list[RenderableType] = []
    for drafter in drafters:
        about = Text(drafter["error"], style="red") if drafter["error"] else Text(drafter["summary"])
        parts.append(Text.assemble((drafter["name"], "bold cyan"), "  ", about))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=2)
        table.add_column(no_wrap=True, min_width=max(names))
        table.add_column(no_wrap=True, min_width=11, style="green")
        table.add_column(overflow="fold")
        for option in drafter["options"]:
            default = "(required)" if option["default"] is None else option["default"]
            table.add_row("", Text(option["name"]), Text(default), Text(option["help"]))
        parts += [table, Text()] if drafter["options"] else [Text()]
    return Group(*parts[:-1])


def print_error(error: Exception) -> None:
    """Print an error as a line on standard error; an error without a message, as after help, prints nothing."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if message:
        print_line(("error:", "bold red"), message)


def print_line(kind: tuple[str, str], message: str) -> None:
    """A word with its style, and a message in one line, on standard error."""
    Console(stderr=True).print(Text.assemble(kind, " ", " ".join(message.split())), soft_wrap=True)
