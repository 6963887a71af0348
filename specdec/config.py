"""Configuration: the options of a run, and dataclasses from mappings, YAML files and ``--set`` settings, strictly.

An unknown key fails and names the nearest one; a value of the wrong type fails and names both. The dataclasses check
their ranges themselves. Torch is imported only where a value is checked, so that a command's help is there at once.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from specdec.arguments import ARGUMENTS, DTYPES
from specdec.errors import ConfigError, check_choice, first_line, shown, unknown
from specdec.options import Given, option
from specdec.parallel import PARALLEL
from specdec.params import SamplingParams
from specdec.runners import EXECUTIONS
from specdec.values import AtLeast1, check_fields, fitting

__all__ = [
    "EngineOptions",
    "ModelOptions",
    "RunConfig",
    "WeightsOptions",
    "check_positive",
    "load_yaml",
    "override",
    "parse",
    "resolve",
]

T = TypeVar("T")
Options = TypeVar("Options", bound="WeightsOptions")

_DEEPEST, _LARGEST = 32, 1_000_000  # of a YAML value

_model_option = functools.partial(option, panel="Model")


def check_positive(where: str = "", /, most: int | None = None, **values: int | None) -> None:
    """Raises ConfigError for an option below 1, or above ``most``, called ``where`` + its name; None is no value."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{where}{name} is {shown(value)}; it must be at least 1")
        if value is not None and most is not None and value > most:
            raise ConfigError(f"{where}{name} is {shown(value)}; it must be at most {most}")


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Which weights. Each option's meaning stands beside it.

    Raises:
        ConfigError: a value that cannot be.
    """

    model: str = _model_option("tiny", "tiny, smollm2 (once `specdec pull smollm2`), a folder, GGUF file or hub id.")
    dtype: str = _model_option("auto", "Of weights and computation: float32, bfloat16, ...; auto: the checkpoint's.")

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)

    @classmethod
    def group(cls, values: dict[str, Any], name: str) -> dict[str, Any]:
        """The part of ``values`` that a setting ``NAME.option=value`` speaks of; it is made where it is not there."""
        return _mapping(values, name)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(WeightsOptions):
    """Which weights, and how the model is run."""

    device: str | None = _model_option(None, "Such as cpu or cuda:0.")
    device_map: str | dict[str, Any] | None = option(None, "Such as auto: split the model over devices.", panel="Model")
    attention: str = _model_option("auto", "auto, sdpa or split; on a GPU aten or flash.")
    execution: str = _model_option("auto", "Which code runs the layers: auto, transformers, fused or native.")
    threads: int | None = _model_option(None, "CPU threads (default torch's own; 1 for tiny).")

    def __post_init__(self) -> None:
        from specdec.attention import check_backend

        WeightsOptions.__post_init__(self)
        if self.threads is not None:
            fitting("threads", self.threads, ARGUMENTS["threads"])
        if self.device is not None and self.device_map is not None:
            raise ConfigError(f"device is {self.device!r} and device_map {self.device_map!r}; give only one of them")
        check_backend(self.attention)
        check_choice("execution", self.execution, EXECUTIONS)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """Which weights, how the model is run, and how many rows a step gets, by how many processes."""

    policy: str = _model_option(
        "acceptance",
        "How many rows a drafter gets. acceptance: one that keeps failing rests; cost: only rows that pay on this "
        "machine; FILE: by a file of `specdec tune`; off: as many as it asks for.",
        metavar="acceptance|cost|FILE|off",
    )
    parallel: str = _model_option(
        "off",
        "For processes started by torchrun. rows: each has the model and runs a share of a step's rows; tensor: each "
        "weight is split over them.",
        metavar="off|rows|tensor",
    )

    def __post_init__(self) -> None:
        from specdec.policy import check_policy

        ModelOptions.__post_init__(self)
        check_policy(self.policy)
        check_choice("parallel", self.parallel, PARALLEL)


@dataclass(frozen=True, kw_only=True)
class RunConfig(EngineOptions):
    """What a YAML file for the command line may hold."""

    drafter: str | dict[str, Any] = option("none", "Who drafts; see `specdec drafters`.", metavar="NAME")
    max_new_tokens: AtLeast1 = option(128, "Most new tokens.")
    stop: str | list[str] = option(list, "Text that ends the answer; repeatable.")
    stop_token_ids: list[int] = option(
        list, "Tokens that end the answer, beside the model's own.", metavar="ID,ID,...", commas=True
    )
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        check_fields(self)
        fitting("stop", self.stop, ARGUMENTS["stop"])

    @property
    def stops(self) -> dict[str, Any]:
        """What ends an answer, as arguments of the engine's methods."""
        return {"stop": self.stop, "stop_token_ids": self.stop_token_ids}

    @classmethod
    def group(cls, values: dict[str, Any], name: str) -> dict[str, Any]:
        """``sampling``, or the chosen drafter by its name or as ``drafter``."""
        if name == "sampling":
            return _mapping(values, name)
        chosen = values.get("drafter", "none")
        drafter = values["drafter"] = {"name": chosen} if isinstance(chosen, str) else _mapping(values, "drafter")
        if name not in ("drafter", drafter.get("name")):
            raise ConfigError(
                f"the setting is for {name!r}, but the drafter is {drafter.get('name')!r}: write that or sampling, or "
                "choose another with --drafter"
            )
        return drafter


def resolve(kind: type[Options], given: Given | None = None, *, where: str = "run") -> Options:
    """The options of a command: the defaults, then the YAML file's, then those given, then the ``--set`` settings.

    Raises:
        ConfigError: as ``load_yaml``, ``override`` and ``parse``.
    """
    given = given or Given()
    values = merge({} if given.file is None else load_yaml(given.file), given.values)
    return parse(kind, override(values, given.settings, kind), where=where)


def merge(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with what ``more`` holds: groups are joined, and a group that is only named again stays as it is."""
    merged = dict(values)
    for key, value in more.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and value == before.get("name", ""):
            continue
        merged[key] = merge(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def override(values: Mapping[str, Any], settings: Iterable[str], kind: type[WeightsOptions]) -> dict[str, Any]:
    """Apply ``option=value`` and ``group.option=value`` settings, whose values are YAML.

    Raises:
        ConfigError: no ``=``, a value that is no YAML, or a group that ``kind`` does not have.
    """
    changed = copy.deepcopy(dict(values))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as lookahead.window=15; got {shown(setting)}")
        try:
            value = read_value(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {shown(setting)}: the value is no YAML: {_short(error)}") from error
        group, _, name = key.rpartition(".")
        if not group:
            changed = merge(changed, {name: value})
            continue
        try:
            kind.group(changed, group)[name] = value
        except ConfigError as error:
            raise ConfigError(f"--set {shown(setting)}: {error}") from error
    return changed


def parse(kind: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """A dataclass from a mapping; a field that is a dataclass itself may be given as a mapping.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong type.
    """
    hints = get_type_hints(kind, include_extras=True)
    known = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    ready = dict(values)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(unknown(f"option of {where}", str(key), known))
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            ready[key] = parse(hints[key], value, where=key)
        else:
            fitting(f"{where}.{key}", value, hints[key])
    for key, one in known.items():
        if key not in ready and one.default is one.default_factory is MISSING:
            raise ConfigError(f"{where}.{key} is missing and has no default; give it")
    return kind(**ready)


class _Loader(yaml.SafeLoader):
    """Safe YAML as of version 1.2: 5e-5 is a number, and only true and false are booleans, not off, no and on."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag != "tag:yaml.org,2002:bool"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?i:true|false)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: no such file, no YAML, or no mapping.
    """
    try:
        values = read_value(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {shown(str(path), 400)}: {error.strerror}; give a YAML file, such as one of a "
            "checkout's configs/"
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # no such text, or no such name
        raise ConfigError(f"the config {shown(str(path), 400)} is no YAML: {_short(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"the config {shown(str(path), 400)} holds {type(values).__name__}; it must be a mapping of options"
        )
    return values


def read_value(text: str) -> Any:
    """What a piece of YAML says; ``5e-5`` is a number, ``off`` a word.

    Raises:
        yaml.YAMLError: it is none, or a value is too long, too deep or too large to be an option.
    """
    try:
        value = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise yaml.YAMLError(f"it holds a value that cannot be read: {first_line(error)}") from error
    _check_size(value)
    return value


def _check_size(value: Any) -> None:
    """Raises YAMLError for a value that is nested too deeply or has too many parts; names may stand for parts, even
    for what they are a part of, so that a line of text may be a value without end.
    """
    ahead, count = [(value, 0)], 0
    while ahead:
        value, depth = ahead.pop()
        parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(parts)
        if depth > _DEEPEST or count > _LARGEST:
            raise yaml.YAMLError(f"it is nested more than {_DEEPEST} deep, or holds more than {_LARGEST} values")
        ahead += [(part, depth + 1) for part in parts]


def _short(error: Exception) -> str:
    """A YAML error on one line: where and what."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The group of that name, made where there is none; raises ConfigError where something else stands there."""
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {shown(value)}, of type {type(value).__name__}; it must be a mapping of options")
    values[key] = dict(value)
    return values[key]  # type: ignore[no-any-return]
