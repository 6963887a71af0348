"""Validation of values from users: strict checks by pydantic, with an error message of one line.

The valid values are an annotation: ``int``, ``str | list[str]``, or ``Annotated[int, Ge(1), "an integer >= 1"]``, whose
text is used in messages. Pydantic is imported with the first check, so that ``specdec --version`` starts fast.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache, partial
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Predicate

from specdec.errors import ConfigError, shown

__all__ = ["AtLeast1", "check_fields", "fitting", "having", "read_json"]

AtLeast1 = Annotated[int, Ge(1), "an integer >= 1"]

# Pydantic's names for a value of the right type that is out of bounds.
_BOUNDS = {
    *("greater_than", "greater_than_equal", "less_than", "less_than_equal", "predicate_failed"),
    *("string_too_short", "too_short", "literal_error"),
}


def fitting(name: str, value: Any, kind: Any) -> Any:
    """The value if it fits the annotation; numbers are returned as Python numbers.

    Nothing else is converted: text does not become a number, and True is not a number. Numbers of numpy count as
    numbers, and arrays of numpy and tensors of torch with one dimension as lists.

    Raises:
        ConfigError: the value does not fit; the message has the value of ``name`` and what it must be.
    """
    from pydantic import ValidationError

    plain = _plain(value)
    try:
        fit = _adapter(kind).validate_python(plain)
    except ValidationError as error:
        kinds = {one["type"] for one in error.errors(include_url=False, include_input=False)}
        bounds = bool(kinds & _BOUNDS) and isinstance(plain, int | float | str)
        what = shown(value) if bounds else f"{shown(value)}, of type {type(value).__name__}"
        raise ConfigError(f"{name} is {what}; it must be {_words(kind)}") from None
    return fit if isinstance(fit, int | float) else plain


def read_json(kind: Any, text: str | bytes) -> Any:
    """A value that fits the annotation, from JSON; ``__pydantic_config__`` of a dataclass sets how strict it is.

    Raises:
        ValueError: the text is no JSON or does not fit; the message names the part.
    """
    from pydantic import ValidationError

    try:
        return _reader(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        given = f", and is {shown(first['input'])}" if first["type"] not in ("json_invalid", "missing") else ""
        raise ValueError(f"{place + ': ' if place else ''}{first['msg']}{given}") from None


def check_fields(options: Any, where: str = "") -> None:
    """Hold a dataclass' values against its annotations, and make numbers Python's own.

    Raises:
        ConfigError: the first that does not fit, called ``where`` + its name.
    """
    hints: Any = _hints(type(options))  # type: ignore[arg-type]  # a class has a hash
    for name, kind in hints.items():
        if not is_dataclass(kind):
            object.__setattr__(options, name, fitting(f"{where}{name}", getattr(options, name), kind))


def having(*names: str) -> Predicate:
    """A check that a value is an object with these attributes, and no class."""
    return Predicate(lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names))


def _plain(value: Any) -> Any:
    """Numbers as Python's own, which transformers and pydantic insist on, alone or in a list, an array or a set."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if getattr(value, "ndim", None) in (0, 1) and hasattr(value, "tolist"):
        return value.tolist()
    if type(value) in (list, tuple, set, frozenset) and any(isinstance(one, Real) for one in value):
        return type(value)(int(one) if _is_other_integer(one) else one for one in value)
    return value


def _is_other_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool | int)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    if isinstance(kind, type) and is_dataclass(kind):
        kind = Annotated[Any, Predicate(partial(_is_one, kind))]
    return TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))


@cache
def _reader(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=None if is_dataclass(kind) else ConfigDict(strict=True))


def _is_one(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    said = next((part for one in (kind, *get_args(kind)) for part in get_args(one) if isinstance(part, str)), None)
    return said or f"of type {kind.__name__ if type(kind) is type else str(kind).replace('typing.', '')}"


Sizes = Annotated[list[Annotated[int, Ge(1)]], "a list of sizes of at least 1, such as 1,2,4,8"]
