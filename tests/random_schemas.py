"""Random JSON schemas of all that structured output follows, most of them short."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["random_schema"]

_NAMES = ["a", "b", "c", "a b", 'q"', "\\", "é", "$ref"]
_VALUES = [1, 2, "a", "b", None, True, False, [1, "x"], {"a": 1}, 'é\n"', 1.5, -3, 0, [], {}, "\0", 1e-7, 123456789012]
_BOUNDS = [0, 1, -3, 7, 100, 2.5, -0.5, 1e6, 2**63, -(2**63) - 1, 0.001]
_FORMATS = ["date", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration", "password", "path"]
_PATTERNS = [
    *(r"^a+$", r"b", r"^[a-c]{2,3}$", r'^"x"$', r"^a\\b$", r"^a|b$", r"\d+", r"^\w+\s\w+$", r"[^a]$", r"^(ab|c)*$"),
    *(r"^.{2}$", r"\D", r"^\S+$", r"(a|^b)c", r"^[\w.-]+@\w+$", r"a$|^b", r"^\/x", r"^[^\s]+$", r"^\u0041", r"^$"),
]


def random_schema(dice: random.Random) -> dict[str, Any]:
    """A schema with two definitions, which its parts may refer to."""
    whole = _schema(dice, 0)
    body = whole if isinstance(whole, dict) else {}
    return {**body, "$defs": {name: _schema(dice, 1) for name in ("n", "m")}}


def _schema(dice: random.Random, depth: int) -> Any:
    kinds = [_number, _text, _constant, _reference]
    if depth < 3:
        kinds += [_list, _object, _object, _joined]
    if dice.random() < 0.05:
        return dice.choice([True, {}, {"type": "null"}, {"type": "boolean"}])
    return dice.choice(kinds)(dice, depth)


def _number(dice: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": dice.choice(["integer", "number"])}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if dice.random() < 0.25:
            schema[keyword] = dice.choice(_BOUNDS)
    return {**schema, "multipleOf": dice.choice([1, 2, 5, 3])} if dice.random() < 0.15 else schema


def _text(dice: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "string", "maxLength": dice.randint(1, 8)}
    if dice.random() < 0.3:
        schema["minLength"] = dice.randint(0, 4)
    if dice.random() < 0.4:
        schema["pattern"] = dice.choice(_PATTERNS)
    elif dice.random() < 0.3:
        schema = {"type": "string", "format": dice.choice(_FORMATS)}
    return schema


def _constant(dice: random.Random, depth: int) -> Any:
    values = dice.sample(_VALUES, dice.randint(1, 4))
    return {"const": values[0]} if dice.random() < 0.4 else {"enum": values}


def _reference(dice: random.Random, depth: int) -> Any:
    return {"$ref": f"#/$defs/{dice.choice('nm')}"}


def _list(dice: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array", "maxItems": dice.randint(1, 4)}
    if dice.random() < 0.7:
        schema["items"] = _schema(dice, depth + 1)
    if dice.random() < 0.3:
        schema["prefixItems"] = [_schema(dice, depth + 1) for _ in range(dice.randint(1, 3))]
    return {**schema, "minItems": dice.randint(0, 3)} if dice.random() < 0.3 else schema


def _object(dice: random.Random, depth: int) -> Any:
    names = dice.sample(_NAMES, dice.randint(0, 3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _schema(dice, depth + 1) for name in names}}
    if dice.random() < 0.7:
        schema["required"] = dice.sample(names if dice.random() < 0.8 else _NAMES, dice.randint(0, min(2, len(names))))
    if dice.random() < 0.7:
        schema["additionalProperties"] = False if dice.random() < 0.7 else _schema(dice, depth + 1)
    if dice.random() < 0.15:
        schema["patternProperties"] = {dice.choice(_PATTERNS): _schema(dice, depth + 1)}
    if dice.random() < 0.15:
        schema[dice.choice(["minProperties", "maxProperties"])] = dice.randint(0, 2)
    return schema


def _joined(dice: random.Random, depth: int) -> Any:
    keyword = dice.choice(["anyOf", "oneOf", "allOf"])
    schema = {keyword: [_schema(dice, depth + 1) for _ in range(dice.randint(1, 3))]}
    beside = _schema(dice, depth + 1) if dice.random() < 0.3 else {}
    return {**beside, **schema} if isinstance(beside, dict) else schema
