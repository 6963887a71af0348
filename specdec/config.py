"""Configuration: dataclasses from mappings, YAML files and ``--set`` options, strictly.

An unknown key fails and names the nearest one; a value of the wrong type fails and names both. The dataclasses check
their ranges themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import dacite
import yaml

from specdec.attention import check_backend
from specdec.errors import ConfigError, unknown
from specdec.lowering import check_optimize
from specdec.policy import check_policy
from specdec.sampling import SamplingParams

__all__ = ["DTYPES", "RunConfig", "load_yaml", "override", "parse", "read_value", "resolve"]

T = TypeVar("T")

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a YAML file for the command line may hold.

    Attributes:
        model: ``tiny``, a folder, or a hub id.
        drafter: its name, or ``name`` and its options.
        sampling: see SamplingParams.
        dtype: of weights and computation; ``auto`` takes the checkpoint's.
        device: such as ``cpu`` or ``cuda:0``; None stays where the model loads.
        device_map: accelerate's, to split a model over devices.
        attention: ``auto``, ``sdpa`` or ``split``.
        optimize: ``auto`` lowers the layers that specdec knows; ``off`` runs transformers' own.
        compile: steps as compiled graphs of static shapes; for GPUs, on a CPU it loses.
        policy: ``acceptance`` (a drafter that keeps failing rests), ``cost`` (only rows that pay here, none where
            speculation loses), a cost file, or ``off``; see Engine.
        threads: CPU threads of torch; None is torch's own choice, but one for ``tiny``, which is too small to gain from
            more and loses a lot where other work keeps the cores busy.
        max_new_tokens: budget of new tokens.
        stop: strings that end the text.

    Raises:
        ConfigError: a value that cannot be.
    """

    model: str = "tiny"
    drafter: str | dict[str, Any] = "none"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    dtype: str = "auto"
    device: str | None = None
    device_map: str | dict[str, Any] | None = None
    attention: str = "auto"
    optimize: str = "auto"
    compile: bool = False
    policy: str = "acceptance"
    threads: int | None = None
    max_new_tokens: int = 128
    stop: str | list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, value in (("max_new_tokens", self.max_new_tokens), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.dtype not in DTYPES:
            raise ConfigError(unknown("dtype", self.dtype, DTYPES))
        if self.device is not None and self.device_map is not None:
            raise ConfigError(f"device is {self.device!r} and device_map {self.device_map!r}; give only one of them")
        check_backend(self.attention)
        check_optimize(self.optimize)
        check_policy(self.policy)


def resolve(
    file: str | Path | None = None, settings: Iterable[str] = (), options: Mapping[str, Any] | None = None
) -> RunConfig:
    """A run's options: the defaults, then the YAML file's, then the ``--set`` ones, then ``options``.

    ``options`` may hold fields of RunConfig and of SamplingParams; None is no option. A drafter named there keeps the
    options that the file or the settings give for it, and drops those of another drafter.

    Raises:
        ConfigError: as ``load_yaml``, ``override`` and ``parse``.
    """
    given = {name: value for name, value in (options or {}).items() if value is not None}
    chosen = given.pop("drafter", None)
    values = {} if file is None else load_yaml(file)
    # Once before the settings, which may speak of the chosen drafter only, and once after, in case they choose another.
    values = override(_with_drafter(values, chosen), settings)
    values = _with_drafter(values, chosen)
    sampling = {f.name for f in fields(SamplingParams)}
    for name, value in given.items():
        if name in sampling:
            values["sampling"] = {**_mapping(values, "sampling"), name: value}
        else:
            values[name] = value
    return parse(RunConfig, values, where="run")


def parse(kind: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """A dataclass from a mapping; a field that is a dataclass itself may be given as a mapping.

    Raises:
        ConfigError: an unknown key, a missing one, or a value of the wrong type.
    """
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]
    ready = dict(values)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(unknown(f"option of {where}", str(key), known))
        if isinstance(value, bool) and hints[key] in (int, float, int | None, float | None):
            raise _wrong_type(f"{where}.{key}", value, hints[key])  # to Python, True is the number 1
        if is_dataclass(hints[key]) and isinstance(value, Mapping):
            ready[key] = parse(hints[key], value, where=key)
    try:
        return dacite.from_dict(kind, ready, config=dacite.Config(strict=True))
    except dacite.WrongTypeError as error:
        raise _wrong_type(f"{where}.{error.field_path}", error.value, error.field_type) from error
    except dacite.MissingValueError as error:
        raise ConfigError(f"{where}.{error.field_path} is missing and has no default; give it") from error


def _wrong_type(name: str, value: Any, expected: Any) -> ConfigError:
    wanted = expected.__name__ if type(expected) is type else str(expected).replace("typing.", "")
    return ConfigError(f"{name} is {value!r}, of type {type(value).__name__}; it must be of type {wanted}")


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 5e-5 is a number, as in YAML 1.2; PyYAML alone takes it for text."""


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
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {str(path)!r} is no YAML: {_short(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config {str(path)!r} holds {type(values).__name__}; it must be a mapping of options")
    return values


def read_value(text: str) -> Any:
    """What a piece of YAML says; ``5e-5`` is a number."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader


def _short(error: Exception) -> str:
    """A YAML error on one line: where and what."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def override(values: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Apply ``key=value`` settings (values are YAML) to a run's options.

    ``lookahead.window=15`` sets an option of the drafter of that name, ``sampling.seed=3`` one of the sampling,
    ``max_new_tokens=64`` one of the run, and ``drafter=lookahead`` chooses a drafter.

    Raises:
        ConfigError: no ``=``, or a group that is neither ``sampling`` nor the chosen drafter.
    """
    changed = dict(values)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, such as lookahead.window=15; got {setting!r}")
        try:
            value = read_value(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting!r}: the value is no YAML: {_short(error)}") from error
        group, _, option = key.rpartition(".")
        drafter = _drafter(changed)
        if key in ("drafter", "drafter.name"):
            changed = _with_drafter(changed, value)
        elif not group:
            changed[option] = value
        elif group == "sampling":
            changed["sampling"] = {**_mapping(changed, "sampling"), option: value}
        elif group in ("drafter", drafter["name"]):
            changed["drafter"] = {**drafter, option: value}
        else:
            name = drafter["name"]
            raise ConfigError(
                f"--set {setting!r} is for {group!r}, but the drafter is {name!r}: write {name}.{option} or "
                f"sampling.{option}, or choose another with --drafter"
            )
    return changed


def _with_drafter(values: Mapping[str, Any], chosen: Any) -> dict[str, Any]:
    """The options with another drafter, whose own options are kept if it is the same one; None changes nothing."""
    if chosen is None or (isinstance(chosen, str) and chosen == _drafter(values)["name"]):
        return dict(values)
    return {**values, "drafter": chosen}


def _drafter(values: Mapping[str, Any]) -> dict[str, Any]:
    """``name`` and options of the drafter in a run's options."""
    if isinstance(values.get("drafter"), str):
        return {"name": values["drafter"]}
    return {"name": "none", **_mapping(values, "drafter")}


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r}, of type {type(value).__name__}; it must be a mapping of options")
    return dict(value)
