"""Options: fields of a dataclass that are also options of commands, declared once with their help.

An option has the field's name. The values that were given on the command line arrive as :class:`Given`;
:func:`specdec.engine.config.resolve` merges them with a file and the defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

__all__ = ["Given", "option", "with_options"]


def option(
    default: Any, help: str, *, panel: str | None = None, metavar: str | None = None, commas: bool = False
) -> Any:
    """A dataclass field that is an option of commands.

    Args:
        default: the value, or a function that makes it.
        help: one sentence; the default is put behind it.
        panel: heading under which the help stands.
        metavar: what stands for the value in the help.
        commas: on the command line, one text with commas stands for a list, of names or of numbers.
    """
    about = {"help": help, "panel": panel, "metavar": metavar, "commas": commas}
    if callable(default):
        return field(default_factory=default, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Given:
    """The values of a command line: a YAML file, ``--set`` settings, and values by field, nested as the dataclass."""

    file: Path | None = None
    settings: Collection[str] = ()
    values: dict[str, Any] = field(default_factory=dict)


def with_options(
    kind: type[Any], *, without: Collection[str] = (), file: str | None = None, setting: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that ``kind`` declares; its first parameter gets them all, as ``Given``.

    Args:
        kind: a dataclass; the fields of nested dataclasses become options, too.
        without: fields that are no options of this command.
        file, setting: examples for ``--config`` and ``--set``; None leaves both out.
    """
    import typer

    known = {one.name: (groups, one, hint) for groups, one, hint in _options(kind, without)}
    shared = {name: _annotation(one, hint) for name, (_, one, hint) in known.items()}
    if file is not None:
        about = typer.Option("--config", metavar="FILE", help=f"YAML with options, such as {file}.")
        shared["config"] = Annotated[Path | None, about]
        about = typer.Option("--set", metavar="KEY=VALUE", help=f"An option, such as {setting}; repeatable.")
        shared["settings"] = Annotated[list[str] | None, about]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        _, *own = signature.parameters.values()

        @functools.wraps(command)
        def with_given(**arguments: Any) -> None:
            values: dict[str, Any] = {}
            for name, (groups, one, hint) in known.items():
                value = arguments.pop(name)
                if value is None or value == []:
                    continue
                group = functools.reduce(lambda outer, inner: outer.setdefault(inner, {}), groups, values)
                commas = one.metadata["commas"]
                group[name] = _parts(value, get_args(hint)) if commas else value
            place, settings = arguments.pop("config", None), arguments.pop("settings", None)
            command(Given(file=place, settings=settings or (), values=values), **arguments)

        keyword = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in shared.items()]
        with_given.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return with_given

    return decorate


def _options(
    kind: type[Any], without: Collection[str], groups: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The fields that are options, in order: the dataclasses' fields that lead there, the field, and its type."""
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint = hints[one.name]
        if one.name not in without and is_dataclass(hint):
            yield from _options(hint, without, (*groups, one.name))  # type: ignore[arg-type]
        elif one.name not in without and "help" in one.metadata:
            yield groups, one, hint


def _parts(text: str, kinds: tuple[Any, ...]) -> list[str | int]:
    """What stands between the commas, as numbers where those are wanted; a part that is none is refused later."""

    def read(part: str) -> str | int:
        try:
            return int(part) if int in kinds else part
        except ValueError:
            return part

    return [read(part.strip()) for part in text.split(",") if part.strip()]


def _annotation(one: Any, hint: Any) -> Any:
    """What typer reads: a type that a command line can give, or nothing, and the help with the default in it."""
    import typer

    about = one.metadata
    kinds = get_args(hint) or (hint,)
    several = any(get_origin(kind) is list for kind in (hint, *kinds)) and not about["commas"]
    single = str if about["commas"] else next((kind for kind in (bool, int, float) if kind in kinds), str)
    kind: Any = list[str] if several else single
    tells = all(one.default is not nothing for nothing in (MISSING, None, False))
    text = f"{about['help'].removesuffix('.')} (default {one.default})." if tells else about["help"]
    names = ["--" + one.name.replace("_", "-")] if kind is bool else []
    shown = typer.Option(*names, help=text, metavar=about["metavar"], rich_help_panel=about["panel"])
    return Annotated[kind | None, shown]
