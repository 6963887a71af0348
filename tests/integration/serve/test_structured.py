"""Structured output over HTTP: drafts beyond the end of the JSON, ends that are asked for early or not at all."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits

from specdec import Engine
from specdec.serve import json_grammar
from tests.serving import Running

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"c": {"enum": ["Paris"]}},
    "required": ["c"],
    "additionalProperties": False,
}


def answered(running: Running, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    with running.http() as http:
        answer = http.post(path, json={"temperature": 0, "max_tokens": 30, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.few(2)
@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("drafter", ["none", "suffix_automaton", "prompt_lookup"])
def test_a_drafted_end_behind_whole_json(
    running: Running, served_engine: Engine, drafter: str, temperature: float
) -> None:
    (end,) = served_engine.target.eos_ids
    earlier = [*served_engine.encode('{"c":"Paris"}'), end]
    found = answered(
        running,
        prompt=earlier * 4,
        response_format=form(CITY),
        temperature=temperature,
        speculation={"drafter": drafter},
        seed=1,
    )
    (choice,) = found["choices"]
    assert (json.loads(choice["text"]), choice["finish_reason"]) == ({"c": "Paris"}, "stop")
    if drafter == "prompt_lookup":
        accepted = found["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        assert accepted, "nothing was drafted, so no end was"


def test_an_end_that_is_ignored_is_repeated(running: Running) -> None:
    found = answered(running, prompt="x", response_format=form(CITY), ignore_eos=True)
    (choice,) = found["choices"]
    assert (json.loads(choice["text"]), choice["finish_reason"]) == ({"c": "Paris"}, "length")
    assert found["usage"]["completion_tokens"] == 30


def test_more_tokens_than_the_json_can_have_end_early(running: Running) -> None:
    found = answered(running, prompt="x", response_format=form(CITY), min_tokens=25)
    (choice,) = found["choices"]
    assert (json.loads(choice["text"]), choice["finish_reason"]) == ({"c": "Paris"}, "stop")
    assert found["usage"]["completion_tokens"] < 25


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_no_text_before_min_tokens(running: Running, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "import os\nimport sy", "max_tokens": 20, "temperature": 0, "stop": ["\n"]}
    with running.http() as http:
        texts, counts = [], []
        for least in (0, 15):
            answer = http.post("/v1/completions", json={**body, "min_tokens": least})
            texts.append(answer.json()["choices"][0]["text"])
            counts.append(answer.json()["usage"]["completion_tokens"])
            if stream:
                lines = http.post("/v1/completions", json={**body, "min_tokens": least, "stream": True}).text.split(
                    "\n"
                )
                events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
                assert "".join(event["choices"][0]["text"] for event in events) == texts[-1]
    assert counts[0] < 15 < counts[1]
    assert texts[1].startswith(texts[0] + "\n")


POINT = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
DRAW = {
    "$defs": {"Point": POINT},
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/Point"}},
    "required": ["p"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("draw", DRAW), ("at", POINT))
]


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_required_calls_follow_each_tool_s_own_references(running: Running, several: bool) -> None:
    for seed in range(3):
        body = {"messages": [{"role": "user", "content": "Draw."}], "tools": TOOLS, "tool_choice": "required"}
        more = {"temperature": 1.5, "seed": seed, "max_tokens": 900, "parallel_tool_calls": several}
        (choice,) = answered(running, "/v1/chat/completions", **body, **more)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        calls = [one["function"] for one in choice["message"]["tool_calls"]]
        assert 1 <= len(calls) <= (16 if several else 1)
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), {"draw": DRAW, "at": POINT}[call["name"]])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"json": CITY}, r'\{"c":"Paris"\}'),
        ({"json": json.dumps(CITY)}, r'\{"c":"Paris"\}'),
        ({"regex": r"[a-c]/\d{2}"}, r"[a-c]/\d{2}"),
        ({"choice": ["left", 'the "right"\n']}, r'left|the "right"\n'),
        ({"grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"grammar": 'start: "a" /[0-9]/'}, r"a\d"),
        ({"json_object": True}, r"\{.*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_outputs_of_vllm(running: Running, asked: dict[str, Any], fits: str) -> None:
    found = answered(running, prompt="x", structured_outputs=asked, temperature=1.0, seed=1)
    (choice,) = found["choices"]
    assert re.fullmatch(fits, choice["text"], re.DOTALL), choice["text"]
    assert choice["finish_reason"] == "stop" or "json_object" in asked or "root" in str(asked)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"json": CITY, "regex": "a"}, "holds json, regex;"),
        ({"json": "{"}, "no JSON"),
        ({"regex": "("}, "regex cannot be followed"),
        ({"regex": "a" * 5000}, "the most is"),
        ({"grammar": "root ::= <"}, "grammar cannot be followed"),
        ({"choice": []}, "choice"),
    ],
    ids=str,
)
def test_structured_outputs_that_cannot_be_followed(running: Running, asked: dict[str, Any], told: str) -> None:
    with running.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "structured_outputs": asked})
    assert answer.status_code == 400, answer.text
    assert re.search(told, answer.json()["error"]["message"]), answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_followed_is_named_in_a_header_and_the_log(
    running: Running, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"type": "object", "properties": {"é": {"type": "array", "uniqueItems": True}}, "minProperties": 9}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    with running.http() as http, caplog.at_level("INFO", logger="specdec.serve"):
        body = {"prompt": "x", "max_tokens": 4, "response_format": asked, "stream": stream}
        answer = http.post("/v1/completions", json=body)
        running.settle()
    assert answer.status_code == 200
    named = answer.headers["x-specdec-not-followed"]
    place = "response_format.json_schema.schema#"
    assert named == f"{place} minProperties; {place}/properties/%C3%A9 uniqueItems"
    assert named in caplog.text


def test_a_grammar_beyond_its_limits_ends_its_own_request(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_grammar, "_limits", lambda: LLParserLimits(max_items_in_row=50, verbose_errors=False))
    many = {
        "type": "object",
        "properties": {f"p{number}": {"const": number} for number in range(60)},
        "required": ["p59"],
    }
    with running.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "response_format": form(many)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_too_complex")
    assert answered(running, prompt="x", response_format=form(CITY))["choices"][0]["text"] == '{"c":"Paris"}'
