"""Structured output over HTTP: drafts beyond the end of the JSON, ends that are asked for early or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec import Engine
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
