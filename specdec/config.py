"""Configuration: dataclasses from mappings, YAML files and ``--set`` options, strictly.

An unknown key fails and names the nearest one; a value of the wrong type fails and names both. The dataclasses check
their ranges themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import dacite
import yaml

from specdec.errors import ConfigError, unknown
from specdec.sampling import SamplingParams

__all__ = ["RunConfig", "load_yaml", "override", "parse"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a YAML file for the command line may hold.

    Attributes:
        model: ``tiny``, a folder, or a hub id.
        drafter: ``name`` and the drafter's options.
        sampling: see SamplingParams.
        dtype: of weights and computation; ``auto`` takes the checkpoint's.
        device: such as ``cpu`` or ``cuda:0``; None stays where the model loads.
        device_map: accelerate's, to split a model over devices.
        attention: ``auto``, ``sdpa`` or ``split``.
        max_new_tokens: budget of new tokens.
        stop: strings that end the text.
    """

    model: str = "tiny"
    drafter: dict[str, Any] = field(default_factory=lambda: {"name": "none"})
    sampling: SamplingParams = field(default_factory=SamplingParams)
    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    attention: str = "auto"
    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")


def parse(kind: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """A dataclass from a mapping.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong type.
    """
    known = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(unknown(f"option of {where}", str(key), known))
    try:
        return dacite.from_dict(kind, dict(values), config=dacite.Config(strict=True))  # type: ignore[type-var]
    except dacite.UnexpectedDataError as error:
        raise ConfigError(unknown(f"option in {where}", str(sorted(error.keys)[0]), _names_below(kind))) from error
    except dacite.WrongTypeError as error:
        raise ConfigError(
            f"{where}.{error.field_path} is {error.value!r}, of type {type(error.value).__name__}; "
            f"it must be {getattr(error.field_type, '__name__', error.field_type)}"
        ) from error
    except dacite.MissingValueError as error:
        raise ConfigError(f"{where}.{error.field_path} is missing and has no default") from error


def _names_below(kind: Any) -> list[str]:
    """Field names of the dataclasses that are fields of ``kind``."""
    defaults = [f.default_factory for f in fields(kind)]
    return [f.name for default in defaults if hasattr(default, "__dataclass_fields__") for f in fields(default)]


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: no such file, no YAML, or no mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config {str(path)!r} holds {type(values).__name__}; it must be a mapping of options")
    return values


def override(values: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Apply ``key=value`` settings (values are YAML) to a run's options.

    ``lookahead.window=15`` sets an option of the drafter of that name, ``sampling.seed=3`` one of the sampling, and
    ``max_new_tokens=64`` one of the run.

    Raises:
        ConfigError: no ``=``, or a group that is neither ``sampling`` nor the chosen drafter.
    """
    changed = dict(values)
    changed["drafter"] = dict(changed.get("drafter") or {"name": "none"})
    changed["sampling"] = dict(changed.get("sampling") or {})
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as lookahead.window=15; got {setting!r}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting!r}: the value is no YAML: {error}") from error
        group, dot, option = key.rpartition(".")
        name = changed["drafter"].get("name")
        if not dot:
            changed[option] = value
        elif group == "sampling":
            changed["sampling"][option] = value
        elif group in ("drafter", name):
            changed["drafter"][option] = value
        else:
            raise ConfigError(f"--set {setting!r}: the chosen drafter is {name!r}; use {name}.{option} or sampling.{option}")
    return changed
