"""Schemas as pydantic, zod and OpenAI's strict helper write them, each with an answer that fits it."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import uuid
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar, Union

from openai.lib._pydantic import to_strict_json_schema
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, RootModel, SecretStr
from typing_extensions import TypedDict

__all__ = ["SCHEMAS"]

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Link(BaseModel):
    name: str
    next: Optional[Link] = None  # noqa: UP045  (as people write it)


class Point(BaseModel):
    x: float
    y: float


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Owner(BaseModel):
    pet: Annotated[Union[Cat, Dog], Field(discriminator="kind")]  # noqa: UP007


class Plain(BaseModel):
    pet: Cat | Dog


class Times(BaseModel):
    at: datetime.datetime
    day: datetime.date
    hour: datetime.time
    took: datetime.timedelta


class Enums(BaseModel):
    color: Color
    level: Level
    word: Literal["a", "b"] = "a"


class Optionals(BaseModel):
    """Fields that may be left out."""

    name: str | None = Field(None, description="a name", examples=["x"])
    tags: list[str] = Field(default_factory=list, max_length=4)


class Line(BaseModel):
    start: Point
    end: Point
    label: str = Field("", max_length=20)


class Strings(BaseModel):
    code: str = Field(pattern=r"^[A-Z]{3}-\d{2,4}$")
    short: str = Field(min_length=1, max_length=8)
    both: str = Field(pattern="^a", max_length=5)


class Numbers(BaseModel):
    percent: int = Field(ge=0, le=100)
    share: float = Field(gt=0, lt=1)
    even: int = Field(multiple_of=2)
    large: int = Field(ge=0, le=2**63 - 1)


class Money(BaseModel):
    price: decimal.Decimal


class Places(BaseModel):
    file: pathlib.Path
    secret: SecretStr
    data: bytes
    link: AnyUrl
    ident: uuid.UUID


class Tuples(BaseModel):
    pair: tuple[int, str]
    many: tuple[int, ...]


class Dicts(BaseModel):
    counts: dict[str, int]
    lists: dict[str, list[Point]]
    words: dict[Literal["a", "b"], int]


class Unions(BaseModel):
    value: int | str | None
    values: list[int | str]
    anything: Any = None


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    a: int
    b: str


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    a: int


class Names(RootModel[list[str]]):
    pass


class Entry(TypedDict):
    name: str
    count: int


class Pair(NamedTuple):
    left: int
    right: str


class Typed(BaseModel):
    entry: Entry
    pair: Pair


class Box(BaseModel, Generic[T]):
    content: T


class Aliased(BaseModel):
    from_: str = Field(alias="from")
    ref: str = Field(alias="$ref")


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Expression(BaseModel):
    operator: Literal["add", "mul"]
    operands: list[Union[Expression, float]]  # noqa: UP007


class Interface(BaseModel):
    kind: Literal["div", "form"]
    children: list[Interface]
    color: Color = Field(description="of it")


_POINT = {"x": 1.5, "y": 2}
_TIMES = {"at": "2024-02-29T10:00:00Z", "day": "2023-12-31", "hour": "10:11:12Z", "took": "P1DT2H"}

_PYDANTIC: dict[type[BaseModel], Any] = {
    Node: {"value": 1, "children": [{"value": 2, "children": []}]},
    Link: {"name": "a", "next": {"name": "b", "next": None}},
    Point: _POINT,
    Owner: {"pet": {"kind": "dog", "good": True}},
    Plain: {"pet": {"kind": "cat", "lives": 3}},
    Times: _TIMES,
    Enums: {"color": "red", "level": 2, "word": "b"},
    Optionals: {"name": None, "tags": ["a", "b"]},
    Line: {"start": _POINT, "end": _POINT, "label": "l"},
    Strings: {"code": "ABC-123", "short": "é", "both": "abc"},
    Numbers: {"percent": 100, "share": 0.25, "even": 4, "large": 12},
    Money: {"price": "12.50"},
    Places: {
        "file": "/etc",
        "secret": "x",
        "data": "y",
        "link": "https://example.com/a?b=c",
        "ident": "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
    },
    Tuples: {"pair": [1, "a"], "many": [1, 2]},
    Dicts: {"counts": {"n": 1}, "lists": {"l": [_POINT]}, "words": {"a": 1}},
    Unions: {"value": None, "values": [1, "a"], "anything": {"b": []}},
    Closed: {"a": 1, "b": ""},
    Open: {"a": 1, "more": [None]},
    Names: ["a", "b"],
    Typed: {"entry": {"name": "n", "count": 1}, "pair": [1, "r"]},
    Box[int]: {"content": 1},
    Box[list[Point]]: {"content": [_POINT]},
    Aliased: {"from": "a", "$ref": "#/x"},
    Reasoning: {"steps": [{"explanation": "e", "output": "o"}], "final_answer": "f"},
    Expression: {"operator": "add", "operands": [1, {"operator": "mul", "operands": [2, 3]}]},
}

_STRICT: dict[type[BaseModel], Any] = {
    Node: {"value": 1, "children": [{"value": 2, "children": []}]},
    Line: {"start": _POINT, "end": _POINT, "label": "l"},
    Enums: {"color": "red", "level": 2, "word": "b"},
    Plain: {"pet": {"kind": "cat", "lives": 3}},
    Optionals: {"name": None, "tags": ["a", "b"]},
    Interface: {"kind": "div", "children": [{"kind": "form", "children": [], "color": "red"}], "color": "green"},
}

_DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
_INT = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


_ZOD: dict[str, tuple[Any, Any]] = {
    "object": ({**_DRAFT, **_object(name={"type": "string"}, age=_INT)}, {"name": "a", "age": 3}),
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        {"a": 1.5},
    ),
    "enum record": (
        {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a b", "c/d"]},
            "additionalProperties": _INT,
        },
        {"a b": 1, "c/d": 2},
    ),
    "email": ({"type": "string", "format": "email", "pattern": _EMAIL}, "a.b@example.com"),
    "url and uuid": (
        _object(url={"type": "string", "format": "uri"}, id={"type": "string", "format": "uuid"}),
        {"url": "http://a.b", "id": "2eb8aa08-aa98-11ea-b4aa-73b441d16380"},
    ),
    "discriminated union": (
        {
            "oneOf": [
                _object(type={"type": "string", "const": "a"}, a={"type": "string"}),
                _object(type={"type": "string", "const": "b"}, b=_INT),
            ]
        },
        {"type": "b", "b": 1},
    ),
    "recursion": (
        {**_DRAFT, **_object(value={"type": "string"}, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})},
        {"value": "a", "next": {"value": "b", "next": None}},
    ),
    "intersection": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            ]
        },
        {"a": "x", "b": True},
    ),
    "tuple": (
        {"type": "array", "prefixItems": [{"type": "string"}, _INT], "items": {"type": "boolean"}},
        ["a", 1, True],
    ),
    "draft 7 tuple": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "string"}, {"type": "number"}],
            "minItems": 2,
            "maxItems": 2,
        },
        ["a", 1],
    ),
    "literals": ({"type": "string", "enum": ["GET", "POST", 'a"b']}, 'a"b'),
    "nullable": (_object(a={"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}), {"a": None}),
}

SCHEMAS: dict[str, tuple[Any, Any]] = {
    **{f"pydantic {one.__name__}": (one.model_json_schema(), fits) for one, fits in _PYDANTIC.items()},
    **{f"strict {one.__name__}": (to_strict_json_schema(one), fits) for one, fits in _STRICT.items()},
    **{f"zod {name}": pair for name, pair in _ZOD.items()},
}
"""Name -> schema and an answer that fits it."""
