"""JSON schemas before they become grammars: what cannot be followed is found here, with its place and keyword.

llguidance follows a part of JSON Schema, refuses another, and takes a few keywords otherwise than the specification
does. :func:`prepared` returns a schema of which a grammar follows every keyword; references are left as they are.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from specdec.errors import shown
from specdec.serve.formats import FORMATS
from specdec.serve.json_disjoint import Disjoint
from specdec.serve.json_places import MAX_DEPTH, References, Unfollowed, below, escaped
from specdec.serve.patterns import translated

__all__ = ["prepared"]

_MAX_BYTES = 1 << 19
_MAX_SCHEMAS = 4096
_MOST = 500  # members of properties, anyOf and the like
_MOST_UNKNOWN = 32  # schemas of oneOf that llguidance compares
_MAX_COUNT = 1 << 16  # minLength, minItems and minProperties
_LARGEST = 2**62  # llguidance bounds numbers by 64 bits
_STEP = 1000  # most of the digits of multipleOf: a grammar has a state for each remainder
_EXACT = 2**53  # integers up to here are numbers of double precision

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_DIALECTS = re.compile("https?://json-schema.org/(draft/20(19-09|20-12)|draft-0[467])/schema#?")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NOT_FOLLOWED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "dependencies"),
    *("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "propertyNames"),
    *("$dynamicRef", "$recursiveRef"),
)

Drop = Callable[[Unfollowed], None]


def prepared(schema: Any, drop: Drop) -> dict[str, Any]:
    """A copy of a schema, of which every keyword is followed as far as this module knows.

    Args:
        schema: the client's schema.
        drop: called with each keyword that cannot be followed, which is then left out; it may raise.

    Raises:
        Unfollowed: it is no schema, or exceeds a bound.
    """
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise Unfollowed("#", "", f"{shown(schema)} is no schema, which is an object", droppable=False)
    size = len(json.dumps(schema))
    if size > _MAX_BYTES:
        raise Unfollowed("#", "", f"it has {size} bytes, and the most is {_MAX_BYTES}", droppable=False)
    return _Walk(copy.deepcopy(dict(schema)), drop).root


class _Walk:
    """Checks and changes, in place, all schemas that the root uses."""

    def __init__(self, root: dict[str, Any], drop: Drop) -> None:
        self.root, self._drop = root, drop
        if not _DIALECTS.fullmatch(str(root.get("$schema"))):
            root.pop("$schema", None)
        self._references = References(root)
        self._disjoint = Disjoint(self._references.resolve)
        self._seen: dict[int, str] = {}
        self._visit_all()
        for keyword in ("$defs", "definitions"):
            for name in list(root[keyword]) if isinstance(root.get(keyword), dict) else []:
                at = f"#/{keyword}/{escaped(name)}"
                if not any(place == at or place.startswith(f"{at}/") for place in self._seen.values()):
                    del root[keyword][name]  # nothing refers to it

    def _visit_all(self) -> None:
        waiting: list[tuple[str, Any]] = [("#", self.root)]
        while waiting:
            place, schema = waiting.pop()
            if isinstance(schema, bool) or id(schema) in self._seen:
                continue
            if not isinstance(schema, dict):
                why = f"{shown(schema)} is no schema, which is an object, true or false"
                raise Unfollowed(place, "", why, droppable=False)
            self._seen[id(schema)] = place
            if len(self._seen) > _MAX_SCHEMAS:
                raise Unfollowed("#", "", f"it has more than {_MAX_SCHEMAS} schemas within", droppable=False)
            self._check(place, schema)
            inner = [
                (f"{place}/{at}", one) for at, one in below(schema) if not at.startswith(("$defs/", "definitions/"))
            ]
            waiting += reversed(inner)
            if "$ref" in schema:
                try:
                    self._references.resolve(schema)
                    waiting.append(self._references.find(schema["$ref"]))
                except ValueError as error:
                    self._refuse(place, schema, "$ref", str(error))

    def _refuse(self, place: str, schema: dict[str, Any], keyword: str, why: str) -> None:
        self._drop(Unfollowed(place, keyword, why))
        del schema[keyword]

    def _check(self, place: str, schema: dict[str, Any]) -> None:
        kinds = schema.get("type", [])
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if not (isinstance(kind, str) and kind in _TYPES):
                why = f"{shown(kind)} is no type; types are {', '.join(sorted(_TYPES))}"
                raise Unfollowed(place, "type", why, droppable=False)
        if schema.get("$schema") not in (None, self.root.get("$schema")):
            self._refuse(place, schema, "$schema", "a schema within a schema has the dialect of the whole")
        for keyword in ("properties", "patternProperties", "anyOf", "oneOf", "allOf", "prefixItems", "required"):
            if isinstance(schema.get(keyword), list | dict) and len(schema[keyword]) > _MOST:
                self._refuse(place, schema, keyword, f"it has {len(schema[keyword])} members, and the most is {_MOST}")
        _simplify(schema)
        for keyword in _NOT_FOLLOWED:
            if keyword in schema:
                self._refuse(place, schema, keyword, "no grammar does that")
                _simplify(schema)  # what belongs to it asks for nothing now
        self._check_numbers(place, schema)
        self._check_counts(place, schema)
        self._check_strings(place, schema)
        options = schema.get("oneOf")
        if not isinstance(options, list) or "anyOf" in schema:
            return
        if self._disjoint.all(options):
            items = [("anyOf" if name == "oneOf" else name, value) for name, value in schema.items()]
            schema.clear()  # the order of keywords stays, as it is the order of properties
            schema.update(items)
        elif len(options) > _MOST_UNKNOWN:
            self._refuse(place, schema, "oneOf", "it is not seen that no answer fits two of so many schemas")

    def _check_numbers(self, place: str, schema: dict[str, Any]) -> None:
        for keyword in ("const", "enum"):
            if keyword in schema and (odd := _unsound(schema[keyword])) is not None:
                self._refuse(place, schema, keyword, odd)
        for keyword in _BOUNDS:
            value = schema.get(keyword)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            lower = keyword.endswith("inimum")
            inside = max(value, -_LARGEST) if lower else min(value, _LARGEST)  # no answer goes so far
            if abs(inside) > _LARGEST or (keyword == "multipleOf" and _digits(value) > _STEP):
                self._refuse(place, schema, keyword, f"{shown(value)} is beyond the numbers that can be followed")
            elif abs(inside) > _EXACT:
                schema[keyword] = _inside(int(inside), lower=lower)

    def _check_counts(self, place: str, schema: dict[str, Any]) -> None:
        for keyword in _COUNTS:
            value = schema.get(keyword)
            if isinstance(value, float) and value.is_integer():
                schema[keyword] = value = int(value)
            if isinstance(value, int) and value > _MAX_COUNT:
                if keyword.startswith("max"):
                    del schema[keyword]  # no context holds so long an answer
                else:
                    self._refuse(place, schema, keyword, f"{shown(value)} is more than {_MAX_COUNT}")
        least, required = schema.get("minProperties"), schema.get("required")
        names = required if isinstance(required, list) else []
        if isinstance(least, int) and least > len(names) + 1:
            self._refuse(place, schema, "minProperties", "names that are free could be one name several times")
        if "additionalItems" in schema and not isinstance(schema.get("items"), list):
            del schema["additionalItems"]  # it speaks of the items behind those of a list

    def _check_strings(self, place: str, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("pattern"), str):
            try:
                schema["pattern"] = translated(schema["pattern"])
            except ValueError as error:
                self._refuse(place, schema, "pattern", str(error))
        named = schema.get("patternProperties")
        if isinstance(named, dict):
            try:
                schema["patternProperties"] = {translated(name): one for name, one in named.items()}
            except ValueError as error:
                self._refuse(place, schema, "patternProperties", str(error))
        form = schema.pop("format", None)  # an annotation, unless it is known
        if isinstance(form, str) and form in FORMATS:
            schema["allOf"] = [*schema.get("allOf", ()), dict(FORMATS[form])]


def _simplify(schema: dict[str, Any]) -> None:
    """Take out keywords that ask for nothing here, and say ``propertyNames`` by keywords that can be followed."""
    if not {"then", "else"} & schema.keys():
        schema.pop("if", None)
    idle = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
    for keyword, needs in idle.items():
        if needs not in schema:
            schema.pop(keyword, None)
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)
    for keyword in ("unevaluatedItems", "unevaluatedProperties", "propertyNames"):
        if schema.get(keyword) is True or schema.get(keyword) == {}:
            del schema[keyword]
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if schema.get(keyword) == {}:
            del schema[keyword]
    names = schema.get("propertyNames")
    pattern = _names(names) if isinstance(names, dict) else None
    if pattern == "":
        del schema["propertyNames"]
    elif pattern is not None and not {"properties", "patternProperties", "required"} & schema.keys():
        del schema["propertyNames"]
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False


def _names(schema: dict[str, Any]) -> str | None:
    """The pattern of the names that ``propertyNames`` allows; ``""`` for all, None where it is no pattern."""
    rest = {name: value for name, value in schema.items() if name not in ("title", "description")}
    if rest.pop("type", "string") != "string":
        return None
    if not rest:
        return ""
    if rest.keys() == {"pattern"} and isinstance(rest["pattern"], str):
        return str(rest["pattern"])
    allowed = [rest["const"]] if "const" in rest else rest.get("enum")
    if len(rest) == 1 and isinstance(allowed, list) and allowed and all(isinstance(one, str) for one in allowed):
        return f"^({'|'.join(re.sub('[^A-Za-z0-9_]', _escape, one) for one in allowed)})$"
    return None


def _escape(found: re.Match[str]) -> str:
    return f"\\x{{{ord(found[0]):x}}}"


def _digits(number: float) -> int:
    """The digits of a number, without zeros at its ends and its point."""
    return int("".join(map(str, Decimal(str(abs(number))).normalize().as_tuple().digits)))


def _inside(bound: int, *, lower: bool) -> float:
    """The nearest number of double precision that is not outside of an integer bound."""
    near = float(bound)
    if (near < bound) if lower else (near > bound):
        near = math.nextafter(near, math.inf if lower else -math.inf)
    return near


def _unsound(value: Any, depth: int = 0) -> str | None:
    """Why a constant cannot be followed, or None."""
    if depth > MAX_DEPTH:
        return f"it holds lists in lists, more than {MAX_DEPTH} deep"
    if isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= _EXACT:
        return f"{shown(value)} is beyond the numbers that can be followed"
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((odd for one in inner if (odd := _unsound(one, depth + 1)) is not None), None)
