"""Schemas before they become grammars: what is refused by name, what is an annotation, and what clients write."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from specdec import Engine
from specdec.serve.errors import ApiError
from specdec.serve.fields import CompletionRequest
from specdec.serve.json_grammar import Grammars
from specdec.serve.reading import read
from specdec.serve.structured import Form, Structured
from tests.client_schemas import SCHEMAS
from tests.walks import accepts, walk


@pytest.fixture(scope="module")
def grammars(tiny_engine: Engine) -> Grammars:
    return Grammars(tiny_engine.tokenizer, tiny_engine.target.vocab_size, tiny_engine.target.eos_ids)


def form_of(grammars: Grammars, schema: Any, *, strict: bool | None = None) -> Form:
    given = {"name": "x", "schema": schema, **({} if strict is None else {"strict": strict})}
    body = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": given}}
    return Structured(lambda: grammars).form(read(CompletionRequest, json.dumps(body).encode())[0])


def in_a(field: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": field}, "required": ["a"], "additionalProperties": False, **more}


LIST = {"type": "array", "items": {"enum": [1, 2]}}
REFUSED: list[tuple[Any, str, str]] = [
    (in_a({**LIST, "uniqueItems": True}), "#/properties/a", "uniqueItems"),
    (in_a({**LIST, "contains": {"const": 2}}), "#/properties/a", "contains"),
    (in_a({"not": {"type": "string"}}), "#/properties/a", "not"),
    (in_a({"if": {"const": 1}, "then": {"const": 2}}), "#/properties/a", "if"),
    (in_a({"type": "integer"}, dependentRequired={"a": ["b"]}), "#", "dependentRequired"),
    (in_a({"type": "object", "propertyNames": {"minLength": 2}}), "#/properties/a", "propertyNames"),
    (in_a({"type": "object", "unevaluatedProperties": False}), "#/properties/a", "unevaluatedProperties"),
    (in_a({"type": "object", "minProperties": 2}), "#/properties/a", "minProperties"),
    (in_a({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), "#/properties/a", "oneOf"),
    (in_a({"type": "string", "pattern": "^(?=a)b"}), "#/properties/a", "pattern"),
    (in_a({"type": "string", "pattern": "["}), "#/properties/a", "pattern"),
    (in_a({"type": "string", "pattern": "(" * 999 + "a" + ")" * 999}), "#/properties/a", "pattern"),
    (in_a({"type": "string", "pattern": "a" * 100_000}), "#/properties/a", "pattern"),
    (in_a({"$ref": "#/$defs/none"}), "#/properties/a", "$ref"),
    (in_a({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"$ref": "#/$defs/b"}}}), "#/properties/a", "$ref"),
    (in_a({"$ref": "https://example.com/schema"}), "#/properties/a", "$ref"),
    (in_a({"$ref": "file:///etc/hostname"}), "#/properties/a", "$ref"),
    (in_a({"type": "integer", "minimum": 10**30}), "#/properties/a", "minimum"),
    (in_a({"const": 2**53 + 1}), "#/properties/a", "const"),
    (in_a({"type": "array", "minItems": 10**9}), "#/properties/a", "minItems"),
    (in_a({"$ref": "#/$defs/b"}, **{"$defs": {"b": {"not": {}}}}), "#/$defs/b", "not"),
    ({"type": "object", "patternProperties": {"^a": True, "b$": True}}, "#", "patternProperties"),
]


@pytest.mark.parametrize(("schema", "place", "keyword"), REFUSED, ids=[f"{one[2]}{n}" for n, one in enumerate(REFUSED)])
def test_what_is_not_followed_is_refused_by_place_and_keyword(
    grammars: Grammars, schema: Any, place: str, keyword: str
) -> None:
    with pytest.raises(ApiError) as caught:
        form_of(grammars, schema)
    assert f"has {keyword} at {place}," in str(caught.value)
    assert caught.value.status == 400
    dropped = form_of(grammars, schema, strict=False).dropped
    assert list(dropped) == [f"response_format.json_schema.schema{place} {keyword}"]


@pytest.mark.parametrize("schema", [{"type": "float"}, in_a("text"), in_a({"type": ["string", 1]}), in_a(3)], ids=str)
def test_what_is_no_schema_is_refused_always(grammars: Grammars, schema: Any) -> None:
    for strict in (True, False):
        with pytest.raises(ApiError, match="#"):
            form_of(grammars, schema, strict=strict)


def test_a_schema_is_bounded_before_anything_reads_it(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "of", None)  # a call would raise TypeError
    deep: Any = {"type": "integer"}
    for _ in range(90):
        deep = in_a(deep)
    for schema in (deep, {"enum": [f"value {number}" for number in range(60_000)]}):
        with pytest.raises(ApiError, match=r"the most is|one another"):
            form_of(grammars, schema)


def test_options_of_the_library_within_a_schema_are_nothing(grammars: Grammars) -> None:
    schema = {**in_a({**LIST, "uniqueItems": True}), "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    with pytest.raises(ApiError, match="uniqueItems"):
        form_of(grammars, schema)
    grammar = form_of(grammars, {**in_a(LIST), "x-guidance": {"whitespace_flexible": True}}).grammar
    assert accepts(grammars, grammar, '{"a":[1,2]}')
    assert not accepts(grammars, grammar, '{"a": [1,2]}')


FOLLOWED: list[tuple[Any, list[Any], list[Any]]] = [
    (in_a({"type": "string", "format": "password"}), [{"a": ""}], [{"a": 1}]),
    (in_a({"type": "string", "format": "date"}), [{"a": "2024-02-29"}], [{"a": "2023-02-29"}, {"a": "x"}]),
    (in_a({"allOf": [{"minimum": 5, "type": "integer"}, {"maximum": 7}]}), [{"a": 6}], [{"a": 8}, {"a": "x"}]),
    (in_a({"type": "string", "pattern": '^"[a-z]"$'}), [{"a": '"b"'}], [{"a": "b"}]),
    (in_a({"type": "string", "pattern": r"^a\\b$"}), [{"a": "a\\b"}], [{"a": "ab"}]),
    (in_a({"type": "string", "pattern": "^a", "maxLength": 2}), [{"a": "ab"}], [{"a": "abc"}, {"a": "b"}]),
    (in_a({"type": "string", "pattern": r"^[\s\S]\W.$"}), [{"a": "a-b"}], [{"a": "aéb"}, {"a": "a-\r"}]),
    (in_a({"type": "string", "pattern": "^[[&&]$"}), [{"a": "["}, {"a": "&"}], [{"a": "a"}]),
    (in_a({"type": "integer", "maximum": 2**63 - 1}), [{"a": 2**53}], [{"a": 2**63}]),
    (in_a({"type": "integer", "maximum": 2**53 + 3}), [{"a": 2**53 + 2}], [{"a": 2**53 + 4}]),
    (in_a({"type": "integer", "minimum": -(2**53) - 3}), [{"a": -(2**53) - 2}], [{"a": -(2**53) - 4}]),
    (in_a({"type": "integer", "maximum": 2**64 - 1, "minimum": 0}), [{"a": 2**53}], [{"a": 2**64}, {"a": -1}]),
    ({"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}}, [{"a": 1}], [{}, {"a": "x"}]),
    ({"type": "object", "properties": {"$ref": {"type": "string"}}}, [{"$ref": "#/x"}], [{"$ref": 1}]),
    (in_a({"$ref": "#/$defs/b~1c"}, **{"$defs": {"b/c": {"const": 1}, "d": {"not": {}}}}), [{"a": 1}], [{"a": 2}]),
    (in_a({"$ref": "#it"}, **{"$defs": {"b": {"$anchor": "it", "const": 1}}}), [{"a": 1}], [{"a": 2}]),
    ({"$id": "https://a.b/c", **in_a({"anyOf": [{"$ref": "c#"}, {"type": "null"}]})}, [{"a": {"a": None}}], [{"a": 1}]),
    (in_a({"$ref": "#/components/schemas/b"}, components={"schemas": {"b": {"format": "int32"}}}), [{"a": 1}], [{}]),
    (in_a({"type": "array", "uniqueItems": True, "maxItems": 1}), [{"a": [1]}], [{"a": [1, 1]}]),
    ({"type": "object", "propertyNames": {"pattern": "^b+$"}}, [{"bb": 1}], [{"c": 1}]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), FOLLOWED, ids=range(len(FOLLOWED)))
def test_a_schema_is_followed(grammars: Grammars, schema: Any, right: list[Any], wrong: list[Any]) -> None:
    form = form_of(grammars, schema)
    assert not form.dropped
    for value in [*right, *wrong]:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        assert accepts(grammars, form.grammar, text) is (value in right), text


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_clients_are_followed(grammars: Grammars, name: str) -> None:
    schema, fits = SCHEMAS[name]
    form = form_of(grammars, schema, strict=True)
    assert accepts(grammars, form.grammar, json.dumps(fits, separators=(",", ":"), ensure_ascii=False))
    for seed in range(2):
        text = walk(grammars, form.grammar, random.Random(seed))
        if text is not None:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
