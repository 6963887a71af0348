"""The options that every command with a model has, and how they combine with a file and the defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from specdec.config import RunConfig

__all__ = ["RunOptions", "with_options"]

_MODEL, _SAMPLING = "Model", "Sampling"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``generate`` and ``chat``; None where none was given. ``--set`` and the file are weaker."""

    drafter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who drafts; see `specdec drafters` (default none).")
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML with options, such as configs/drafter/lookahead.yaml.")
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option, such as lookahead.window=15; repeatable."),
    ] = None
    max_new_tokens: Annotated[int | None, typer.Option(help="Budget of new tokens (default 128).")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None

    model: Annotated[
        str | None,
        typer.Option(help="tiny (in the package), a folder, or a hub id (default tiny).", rich_help_panel=_MODEL),
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, ... (default auto).", rich_help_panel=_MODEL)
    ] = None
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.", rich_help_panel=_MODEL)] = None
    device_map: Annotated[
        str | None, typer.Option(help="Such as auto: split the model over devices.", rich_help_panel=_MODEL)
    ] = None
    attention: Annotated[
        str | None, typer.Option(help="auto, sdpa or split (default auto).", rich_help_panel=_MODEL)
    ] = None
    optimize: Annotated[
        str | None, typer.Option(help="auto, or off: transformers' own layers.", rich_help_panel=_MODEL)
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option("--compile", help="Run steps as compiled graphs (for GPUs).", rich_help_panel=_MODEL),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="acceptance|cost|FILE|off",
            help="acceptance: a drafter that keeps failing rests; cost: only rows that pay on this machine; FILE: by a "
            "file of `specdec tune` (default acceptance).",
            rich_help_panel=_MODEL,
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option(help="CPU threads (default torch's own; 1 for tiny).", rich_help_panel=_MODEL)
    ] = None

    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default 0.0).", rich_help_panel=_SAMPLING)] = (
        None
    )
    top_k: Annotated[int | None, typer.Option(help="0 is off (default 0).", rich_help_panel=_SAMPLING)] = None
    top_p: Annotated[float | None, typer.Option(help="1 is off (default 1.0).", rich_help_panel=_SAMPLING)] = None
    min_p: Annotated[float | None, typer.Option(help="0 is off (default 0.0).", rich_help_panel=_SAMPLING)] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="1 is off (default 1.0).", rich_help_panel=_SAMPLING)
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of the sampling noise (default 0).", rich_help_panel=_SAMPLING)] = (
        None
    )
    acceptance: Annotated[
        str | None, typer.Option(help="auto, match, reject or typical (default auto).", rich_help_panel=_SAMPLING)
    ] = None
    allow_lossy: Annotated[
        bool | None,
        typer.Option("--allow-lossy", help="Permit an acceptance that changes the text.", rich_help_panel=_SAMPLING),
    ] = None

    def resolve(self) -> RunConfig:
        """Put together with the file and the defaults; the drafter's options are checked too.

        Raises:
            ConfigError: an unknown option, or a value that cannot be.
        """
        from specdec import config, registry

        options = asdict(self)
        file, settings, stop = options.pop("config"), options.pop("settings"), options.pop("stop")
        run = config.resolve(file, settings or (), {**options, "stop": stop or None})
        registry.parse_drafter(run.drafter)  # before a large model is loaded for nothing
        return run


def with_options(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that are the fields of ``kind``, a dataclass; its first parameter takes them all."""
    hints = get_type_hints(kind, include_extras=True)
    names = [f.name for f in fields(kind)]
    shared = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[n]) for n in names]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        _, *own = signature.parameters.values()

        @functools.wraps(command)
        def with_kind(**values: Any) -> None:
            options = kind(**{name: values.pop(name) for name in names})
            command(options, **values)

        with_kind.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return with_kind

    return decorate
