"""Places in a JSON schema: the schemas within it, what references name, and where a grammar fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from specdec.errors import shown

__all__ = ["MAX_DEPTH", "References", "Unfollowed", "below", "escaped", "located", "places", "without"]

MAX_DEPTH = 64
"""Most levels of schemas in a schema, and of lists and objects in a constant."""

_ONE = ("items", "additionalItems", "additionalProperties")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_AROUND = ("$schema", "$id", "$defs", "definitions")
_TRIED_BYTES = 1 << 20  # of schemas that are tried by themselves, to find the one that cannot be followed


class Unfollowed(Exception):
    """What a grammar would not follow.

    Attributes:
        place: the JSON pointer of the schema that holds it.
        keyword: the keyword; ``""`` for the schema as a whole.
        droppable: whether the rest of the schema can be followed without it.
    """

    def __init__(self, place: str, keyword: str, why: str, *, droppable: bool = True) -> None:
        super().__init__(why)
        self.place, self.keyword, self.droppable = place, keyword, droppable


def places(schema: Any, at: str = "#", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas in a schema with their JSON pointers, outer ones first.

    Raises:
        Unfollowed: they are too deep in one another.
    """
    if not isinstance(schema, dict):
        return
    if depth > MAX_DEPTH:
        raise Unfollowed(at, "", f"more than {MAX_DEPTH} schemas are in one another", droppable=False)
    yield at, schema
    for name, inner in below(schema):
        yield from places(inner, f"{at}/{name}", depth + 1)


def below(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly in a schema, each with its part of a JSON pointer."""
    for keyword in _ONE:
        if keyword in schema and not isinstance(schema[keyword], list):
            yield keyword, schema[keyword]
    for keyword in _MANY:
        if isinstance(schema.get(keyword), list):
            yield from ((f"{keyword}/{place}", one) for place, one in enumerate(schema[keyword]))
    for keyword in _NAMED:
        if isinstance(schema.get(keyword), dict):
            yield from ((f"{keyword}/{escaped(name)}", one) for name, one in schema[keyword].items())


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def without(schema: dict[str, Any], error: Unfollowed) -> None:
    """Take a keyword that cannot be followed out of a schema."""
    del next(one for at, one in places(schema) if at == error.place)[error.keyword]


def located(schema: dict[str, Any], problem: Callable[[dict[str, Any]], str | None]) -> Unfollowed | None:
    """Why no grammar can be made of a schema, with the innermost place and the keyword; None where it can.

    Args:
        schema: the schema.
        problem: tries to make a grammar, and returns why that fails, or None.
    """
    why = problem(schema)
    if why is None:
        return None
    left = _TRIED_BYTES

    def tried(one: dict[str, Any]) -> str | None:
        nonlocal left
        whole = {**{name: schema[name] for name in _AROUND if name in schema}, **one}
        left -= len(json.dumps(whole))
        return problem(whole) if left > 0 else None

    for at, one in sorted(places(schema), key=lambda pair: -pair[0].count("/")):
        reason = why if one is schema else tried(one)
        if reason is None:
            continue
        for keyword in [name for name in one if name not in _AROUND]:
            if tried({name: value for name, value in one.items() if name != keyword}) is None and left > 0:
                return Unfollowed(at, keyword, reason)
        return Unfollowed(at, "", reason, droppable=False)
    return Unfollowed("#", "", why, droppable=False)


class References:
    """What ``$ref`` names in a schema; nothing is looked up elsewhere.

    Args:
        root: the schema.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._base = root["$id"] if isinstance(root.get("$id"), str) else ""
        self._places = {id(one): at for at, one in places(root)}
        self._named: dict[str, tuple[str, Any]] = {"#": ("#", root)}
        self._nested = False
        for at, one in places(root):
            self._add_names(at, one)

    def _add_names(self, at: str, schema: dict[str, Any]) -> None:
        name, old = schema.get("$id"), schema.get("id")
        if name is None and isinstance(old, str) and old.startswith(("#", "http:", "https:", "urn:")):
            name = old  # of draft 4; elsewhere a property may be called so
        if isinstance(name, str):
            self._named[urljoin(self._base, name).removesuffix("#")] = self._named[name] = at, schema
            self._nested |= at != "#"
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(keyword), str):
                self._named[f"#{schema[keyword]}"] = self._named[f"{self._base}#{schema[keyword]}"] = at, schema

    def find(self, reference: Any) -> tuple[str, Any]:
        """The place and the schema that a reference names.

        Raises:
            ValueError: it names none; the message says why.
        """
        if not isinstance(reference, str):
            raise ValueError(f"{shown(reference)} is no reference")
        if self._nested and not reference.endswith("#") and "#" in reference:
            raise ValueError(f"{shown(reference)} names a place beside schemas that have an $id of their own")
        resolved = urljoin(self._base, reference)
        found = self._named.get(reference) or self._named.get(resolved)
        return found or self._pointed(reference, resolved)

    def _pointed(self, reference: str, resolved: str) -> tuple[str, Any]:
        start, _, pointer = resolved.partition("#")
        at: Any = self._root
        known = start in ("", self._base.partition("#")[0]) and pointer.startswith("/")
        for part in unquote(pointer).split("/")[1:] if known else ():
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and len(name) < 6 and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, dict) and name in at:
                at = at[name]
            else:
                known = False
                break
        if not known:
            raise ValueError(f"{shown(reference)} is no place in this schema")
        return self._places.get(id(at), f"#{pointer}"), at

    def resolve(self, schema: Any) -> Any:
        """The schema that a schema stands for, where it is a reference; any other as it is.

        Raises:
            ValueError: references lead to one another, or to none.
        """
        for _ in range(MAX_DEPTH):
            if not (isinstance(schema, dict) and "$ref" in schema):
                return schema
            schema = self.find(schema["$ref"])[1]
        raise ValueError("its references lead to one another without end")
