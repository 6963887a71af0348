"""Reading a request's body: JSON to checked fields, and the error that names the first field that does not fit."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from specdec.errors import unknown
from specdec.serve.errors import ApiError
from specdec.serve.fields import ChatRequest, Fields, Generating, is_empty
from specdec.serve.other_fields import refused, short, translated

__all__ = ["checked", "read"]

Kind = TypeVar("Kind", bound=Fields)


def read(kind: type[Kind], body: bytes, *, ignores: bool = False) -> tuple[Kind, list[str]]:
    """The checked fields of a body, and the names of those that are ignored.

    Args:
        kind: the body's model.
        body: the body's JSON.
        ignores: whether fields that are unknown, or that this server cannot follow, are ignored in place of an error.

    Raises:
        ApiError: the body is no JSON object, or a field does not fit; it names the first such field.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is no JSON: {error}; send one JSON object", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(f"the body is {short(values)}; send one JSON object", code="invalid_json")
    return checked(kind, values, ignores=ignores)


def checked(kind: type[Kind], values: dict[str, Any], *, ignores: bool = False) -> tuple[Kind, list[str]]:
    """The same of the body's values; raises as :func:`read` does."""
    ignored: list[str] | None = [] if ignores else None
    if issubclass(kind, Generating):
        values = translated(values, chat=issubclass(kind, ChatRequest), ignored=ignored)
    values = _served(kind, values)
    try:
        fields = kind.model_validate(values, context=None if ignored is None else {"ignored": ignored})
    except ValidationError as error:
        raise _unfit(kind, error) from None
    return fields, ignored or []


def _served(kind: type[Fields], values: dict[str, Any]) -> dict[str, Any]:
    """The fields that have a value; raises ApiError for one that asks for a feature that this server lacks."""
    for name, nothing in kind.refused.items():
        value = values.get(name)
        asks = value is not None if name == "guided_json" else not is_empty(value)  # {} is a schema, of any JSON
        if asks and value not in nothing:
            raise refused(name, value, nothing, kind.why.get(name, "which this server does not do"))
    return {name: value for name, value in values.items() if name not in kind.refused}


def _unfit(kind: type[Fields], error: ValidationError) -> ApiError:
    """The error of the first field that does not fit; for a union, the error of the member that the value resembles."""
    found = error.errors(include_url=False)
    first = max(found, key=lambda one: (one["type"] in _OWN, len(one["loc"])))
    if all(one["loc"][0] != first["loc"][0] for one in found[:1]):
        first = found[0]
    names = [
        str(part) for part in first["loc"] if isinstance(part, int) or (part not in _TAGS and not set("[<") & {*part})
    ]
    place = ".".join(names)
    if first["type"] == "extra_forbidden":
        message = (
            unknown("field", names[-1], kind.model_fields)
            if len(names) == 1
            else f"there is no field {place}; leave it out"
        )
        return ApiError(message, param=place, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"{place} is missing; the request needs it", param=place, code="missing_required_parameter")
    if first["type"] in _OWN:  # of field_types, which say the value themselves
        said = "has" if first["type"] == "too_long" else f"is {short(first['input'])};"
        return ApiError(f"{place} {said} {first['msg']}", param=place)
    must = re.sub(r"^\w+ should", "it must", first["msg"])
    return ApiError(f"{place} is {short(first['input'])}; {must}", param=place)


_OWN = {"too_long", "prompt_type"}
_TAGS = {"str", "int", "float", "bool", "list", "dict", "constrained-str", "NamedTool", "literal"}
