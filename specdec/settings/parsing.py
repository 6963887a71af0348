"""Dataclasses from mappings and YAML files, strictly.

An unknown key fails and names the nearest one; a value of the wrong type fails and names both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from specdec.errors import ConfigError, first_line, shown, unknown
from specdec.settings.validation import fitting

__all__ = ["check_positive", "load_yaml", "parse", "yaml_fault"]

T = TypeVar("T")

_DEEPEST, _LARGEST = 32, 1_000_000  # of a YAML value


def check_positive(where: str = "", /, most: int | None = None, **values: int | None) -> None:
    """Raises ConfigError for an option below 1, or above ``most``, called ``where`` + its name; None is no value."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{where}{name} is {shown(value)}; it must be at least 1")
        if value is not None and most is not None and value > most:
            raise ConfigError(f"{where}{name} is {shown(value)}; it must be at most {most}")


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
    """Safe YAML as of version 1.2, in which a key stands once.

    5e-5 is a number, 010 is ten and 0o10 eight; only true and false are booleans, not off, no and on; and 1:30, 1_000
    and 2026-01-01 are words.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._flattened: set[Any] = set()

    def construct_yaml_int(self, node: Any) -> int:
        text = self.construct_scalar(node)
        digits = text.lstrip("+-")
        value = int(digits, 0 if digits[1:2] in ("o", "x") else 10)
        return -value if text.startswith("-") else value

    def flatten_mapping(self, node: Any) -> None:
        """Called before a mapping is made, and perhaps again once others' keys have been merged into its own."""
        places: dict[Any, Any] = {}
        for key, _ in () if node in self._flattened else node.value:
            known = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if known in places:
                what = f"the key {shown(key.value)} stands twice, first in line {places[known].line + 1}; keep one"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            places[known] = key.start_mark
        self._flattened.add(node)
        super().flatten_mapping(node)


_TAG = "tag:yaml.org,2002:"
_KINDS = {
    "bool": (r"(?i:true|false)$", "tTfF"),
    "int": (r"([-+]?[0-9]+|[-+]?0o[0-7]+|[-+]?0x[0-9a-fA-F]+)$", "-+0123456789"),
    "float": (
        r"([-+]?(\d+\.\d*|\.\d+|(\d+\.?\d*|\.\d+)[eE][-+]?\d+)|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        "-+.0123456789",
    ),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag.removeprefix(_TAG) not in (*_KINDS, "timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_rule, _first) in _KINDS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(_rule), list(_first))
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)


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
        raise ConfigError(f"the config {shown(str(path), 400)} is no YAML: {yaml_fault(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"the config {shown(str(path), 400)} holds {type(values).__name__}; it must be a mapping of options"
        )
    return values


def read_value(text: str) -> Any:
    """The value of a piece of YAML; ``5e-5`` is a number, ``off`` a word.

    Raises:
        yaml.YAMLError: the text is no YAML, or a value is too long, too deep or too large for an option.
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


def yaml_fault(error: Exception) -> str:
    """A YAML error on one line: where and what."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
