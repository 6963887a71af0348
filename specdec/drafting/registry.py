"""Registry: drafters by name, from the entry points of installed packages.

A package adds a drafter by declaring ``name = "module:Class"`` in the entry point group ``specdec.drafters``. The class
needs a ``name``, a ``Config`` dataclass and ``build(config, target)``. A class with weights may have a classmethod
``describe_weights(folder)``, which returns lines of text. A drafter's module is imported at its first use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_type_hints

from specdec.drafter import Drafter
from specdec.errors import CheckpointError, ConfigError, check_choice, shown
from specdec.settings.arguments import checked
from specdec.settings.parsing import parse
from specdec.settings.validation import fitting
from specdec.step import torch_switches
from specdec.target import FINAL, Target

__all__ = [
    "GROUP",
    "DrafterSpec",
    "describe_weights",
    "drafter_names",
    "drafter_type",
    "make_drafter",
    "parse_drafter",
]

GROUP = "specdec.drafters"

DrafterSpec = str | Mapping[str, Any] | Drafter
"""A registered name, ``{"name": ..., **options}``, or a drafter."""


def _entries() -> dict[str, EntryPoint]:
    """Entry points by name; after a change of the folders to import from they are read again, which takes a while."""
    folders = [folder or "." for folder in sys.path]
    return _read(tuple((folder, os.stat(folder).st_mtime_ns) for folder in folders if os.path.exists(folder)))


@lru_cache(1)
def _read(folders: tuple[tuple[str, int], ...]) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def drafter_names() -> list[str]:
    """Names of all registered drafters, sorted."""
    return sorted(_entries())


def drafter_type(name: str) -> Any:
    """The class registered under a name.

    Raises:
        ConfigError: no such name, or its package does not import.
    """
    entries = _entries()
    check_choice("drafter", name, entries)
    registered = f"drafter {name!r} is registered as {entries[name].value!r}, which"
    try:
        kind = entries[name].load()
    except Exception as error:  # code of others: it may raise anything
        raise ConfigError(
            f"{registered} does not import: {type(error).__name__}: {error}; reinstall the package that provides it"
        ) from error
    missing = [part for part in ("Config", "build") if not hasattr(kind, part)]
    if missing:
        raise ConfigError(f"{registered} has no {' and no '.join(missing)}; subclass specdec.DrafterBase")
    return kind


def parse_drafter(spec: str | Mapping[str, Any]) -> tuple[Any, Any]:
    """The class and the checked config that a name, or ``{"name": ..., **options}``, stands for.

    Raises:
        ConfigError: unknown name or option (the nearest one is named), or a value out of range.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"drafter {shown(spec)} has no name; choose one of {', '.join(drafter_names())}")
    kind = drafter_type(name)
    return kind, parse(kind.Config, options, where=name)


def describe_weights(folder: Path) -> tuple[str, list[str]]:
    """The name of the drafter that reads the weights in a folder or file, and its description of them, line by line.

    Raises:
        CheckpointError: there is no such folder, or no drafter reads it; the message has each drafter's reason.
    """
    if not folder.exists():
        raise CheckpointError(f"there is no folder {str(folder)!r}; give the one that holds the weights of a drafter")
    reasons = list[str]()
    for name in drafter_names():
        describe = getattr(drafter_type(name), "describe_weights", None)
        if describe is not None:
            try:
                return name, describe(folder)
            except CheckpointError as error:
                reasons.append(f"{name}: {error}")
    raise CheckpointError(f"no drafter reads {str(folder)!r}: {'; '.join(reasons)}")


@torch_switches.makes
@checked
def make_drafter(drafter: DrafterSpec, target: Target) -> Drafter:
    """A drafter from its name, from ``{"name": ..., **options}``, or itself.

    Raises:
        ConfigError: unknown name or option (the nearest one is named), a value out of range, or a drafter that lacks an
            attribute of :class:`specdec.drafter.Drafter`.
    """
    built: Drafter
    if isinstance(drafter, str | Mapping):
        kind, config = parse_drafter(drafter)
        built = kind.build(config, target)
    else:
        built = drafter
    hints = get_type_hints(Drafter)
    missing = [name for name in hints if not hasattr(built, name)]
    if missing:
        raise ConfigError(
            f"drafter {type(built).__name__} does not say its {', '.join(missing)}; subclass specdec.DrafterBase, "
            "which has defaults, or specdec.DrafterWrapper around another drafter"
        )
    for name, hint in hints.items():
        fitting(f"{name} of drafter {type(built).__name__}", getattr(built, name), hint)
    outside = sorted(built.taps - {FINAL, *range(target.num_layers + 1)})
    if outside:
        raise ConfigError(
            f"taps of drafter {built.name!r} hold layer {outside[0]}; the target has {target.num_layers} layers, and "
            f"FINAL ({FINAL}) is the last one after the norm"
        )
    return built
