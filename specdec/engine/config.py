"""The options of a run: defaults, then a YAML file, then what a command was given, then ``--set``.

The dataclasses check their ranges themselves. Torch is imported only where a value is checked, so that a command's
help is there at once.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from specdec.errors import ConfigError, check_choice, shown
from specdec.parallel import PARALLEL
from specdec.runners import ACTIVATIONS, ATTENTIONS, EXECUTIONS
from specdec.settings.arguments import ARGUMENTS, DTYPES
from specdec.settings.options import Given, option
from specdec.settings.parsing import load_yaml, parse, read_value, yaml_fault
from specdec.settings.sampling_params import SamplingParams
from specdec.settings.validation import AtLeast1, check_fields, fitting

__all__ = ["EngineOptions", "ModelOptions", "RunConfig", "WeightsOptions", "override", "resolve"]

Options = TypeVar("Options", bound="WeightsOptions")

_model_option = functools.partial(option, panel="Model")


@dataclass(frozen=True, kw_only=True)
class WeightsOptions:
    """Which weights. Each option's meaning stands beside it.

    Raises:
        ConfigError: a value that cannot be.
    """

    model: str = _model_option(
        "tiny",
        "tiny, smollm2 (once `specdec pull smollm2`), a folder, GGUF file or hub id; of its files one: ID:Q4_K_M.",
    )
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

    revision: str | None = _model_option(None, "A branch, a tag or a commit of the model's repository on the hub.")
    subfolder: str | None = _model_option(None, "The folder in the model's folder or repository that holds it.")
    tokenizer: str | None = _model_option(
        None, "The tokenizer, named as a model is (default: the model's).", metavar="MODEL"
    )
    device: str | None = _model_option(None, "Such as cpu or cuda:0.")
    device_map: str | dict[str, Any] | None = option(None, "Such as auto: split the model over devices.", panel="Model")
    attention: str = _model_option("auto", "auto; or on a GPU flash: flash-attn's kernel in place of torch's.")
    execution: str = _model_option("auto", "Which code runs the layers: auto, modules, fused or native.")
    activations: str = _model_option(
        "default", "int8: round the rows that a GGUF file's quantised weights are multiplied with to 8 bits."
    )
    max_model_len: int | None = _model_option(
        None,
        "Most tokens of a prompt and its answer (default: the model's context; where it has long rotary factors, the "
        "original one, beyond which they are taken).",
    )
    threads: int | None = _model_option(None, "CPU threads (default torch's own; 1 for tiny).")

    def __post_init__(self) -> None:
        WeightsOptions.__post_init__(self)
        for name in ("threads", "max_model_len"):
            if (value := getattr(self, name)) is not None:
                fitting(name, value, ARGUMENTS[name])
        if self.device is not None and self.device_map is not None:
            raise ConfigError(f"device is {self.device!r} and device_map {self.device_map!r}; give only one of them")
        check_choice("attention", self.attention, ATTENTIONS)
        check_choice("execution", self.execution, EXECUTIONS)
        check_choice("activations", self.activations, ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """Which weights, how the model is run, and how many rows a step gets, by how many processes."""

    policy: str = _model_option(
        "acceptance",
        "How many rows a drafter gets. acceptance: as many as accepted tokens pay for; FILE: the same, by a file "
        "of `specdec tune`; off: as many as it asks for.",
        metavar="acceptance|FILE|off",
    )
    parallel: str = _model_option(
        "off",
        "For processes started by torchrun. rows: each has the model and runs a share of a step's rows; tensor: each "
        "weight is split over them.",
        metavar="off|rows|tensor",
    )

    def __post_init__(self) -> None:
        from specdec.costs.policy import check_policy

        ModelOptions.__post_init__(self)
        check_policy(self.policy)
        check_choice("parallel", self.parallel, PARALLEL)


@dataclass(frozen=True, kw_only=True)
class RunConfig(EngineOptions):
    """What a YAML file for the command line may hold."""

    drafter: str | dict[str, Any] = option("none", "The drafter; see `specdec drafters`.", metavar="NAME")
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
    texts: dict[str, str] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as lookahead.window=15; got {shown(setting)}")
        if texts.setdefault(key, text) != text:
            raise ConfigError(f"--set {key} is given twice, as {texts[key]} and as {text}; keep one")
        try:
            value = read_value(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {shown(setting)}: the value is no YAML: {yaml_fault(error)}") from error
        group, _, name = key.rpartition(".")
        if not group:
            changed = merge(changed, {name: value})
            continue
        try:
            kind.group(changed, group)[name] = value
        except ConfigError as error:
            raise ConfigError(f"--set {shown(setting)}: {error}") from error
    return changed


def _mapping(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The group of that name, made where there is none; raises ConfigError where something else stands there."""
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {shown(value)}, of type {type(value).__name__}; it must be a mapping of options")
    values[key] = dict(value)
    return values[key]  # type: ignore[no-any-return]
