"""Whether no JSON value fits two schemas, so that ``oneOf`` of them is ``anyOf``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Disjoint"]

_DEPTH = 8  # levels of properties that are looked at
_PAIRS = 20_000  # pairs of schemas that are looked at, in all


class Disjoint:
    """Looks whether schemas have no value in common.

    Args:
        resolve: returns the schema that a reference stands for, and any other as it is; may raise ValueError.
    """

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        self._resolve, self._left = resolve, _PAIRS

    def all(self, options: Sequence[Any]) -> bool:
        """Whether it is certain that no value fits two of the schemas."""
        return self._by_constant(options) or all(
            self._apart(one, two, 0) for place, one in enumerate(options) for two in options[:place]
        )

    def _by_constant(self, options: Sequence[Any]) -> bool:
        """Whether all are objects that must have one property, each with other values: a discriminator."""
        try:
            whole = [self._resolve(one) for one in options]
            if not all(isinstance(one, dict) and isinstance(one.get("required"), list) for one in whole):
                return False
            for name in whole[0]["required"]:
                held = [self._resolve(one.get("properties", {}).get(name)) for one in whole if name in one["required"]]
                values = [_values(one) for one in held if isinstance(one, dict)]
                known = [one for one in values if one is not None]
                if len(known) == len(options) and len(set().union(*known)) == sum(map(len, known)):
                    return all(_kinds(one) == {"object"} for one in whole)
        except (ValueError, TypeError, AttributeError):  # some part is no schema, which others tell
            return False
        return False

    def _apart(self, one: Any, two: Any, depth: int) -> bool:
        self._left -= 1
        if depth > _DEPTH or self._left < 0:
            return False
        try:
            one, two = self._resolve(one), self._resolve(two)
        except ValueError:
            return False
        if one is False or two is False:
            return True
        if not (isinstance(one, dict) and isinstance(two, dict)):
            return False
        for part in ("anyOf", "oneOf"):
            for whole, other in ((one, two), (two, one)):
                options = whole.get(part)
                if isinstance(options, list) and all(self._apart(option, other, depth + 1) for option in options):
                    return True
        values = _values(one), _values(two)
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        common = _kinds(one) & _kinds(two)
        return not common or (common == {"object"} and self._other_properties(one, two, depth))

    def _other_properties(self, one: dict[str, Any], two: dict[str, Any], depth: int) -> bool:
        """Whether objects differ: one must have a property that the other may not have, or not with such a value."""
        for whole, other in ((one, two), (two, one)):
            held, others = whole.get("properties", {}), other.get("properties", {})
            required = whole.get("required")
            if not (isinstance(held, dict) and isinstance(others, dict) and isinstance(required, list)):
                continue
            for name in required:
                if name in others:
                    if name in held and self._apart(held[name], others[name], depth + 1):
                        return True
                elif other.get("additionalProperties") is False and not other.get("patternProperties"):
                    return True
        return False


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values that a schema lists, as JSON; None where it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or any(isinstance(one, float | list | dict) for one in listed):
        return None  # 1.0 is 1, also within lists
    return {json.dumps(one) for one in listed}


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types of the values that fit a schema."""
    kinds: Any = schema.get("type", ["null", "boolean", "object", "array", "number", "string"])
    found = {"number" if kind == "integer" else str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])}
    values = _values(schema)
    return found if values is None else found & {_NAMES[type(json.loads(one))] for one in values}


_NAMES = {bool: "boolean", int: "number", str: "string", type(None): "null"}
