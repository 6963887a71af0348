"""Fields: sizes are looked at before items are, and what asks for nothing is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from specdec.serve.errors import ApiError
from specdec.serve.fields import ChatRequest, CompletionRequest
from specdec.serve.other_fields import ANY, NEUTRAL, translated
from specdec.serve.reading import read


def completion(**fields: Any) -> CompletionRequest:
    return read(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())[0]


def told(kind: Any = CompletionRequest, **fields: Any) -> str:
    with pytest.raises(ApiError) as error:
        read(kind, json.dumps({"prompt": "x", **fields}).encode())
    return str(error.value)


def test_a_long_list_is_refused_before_its_items_are_looked_at() -> None:
    for fields in ({"stop": [5] * 65}, {"logit_bias": {str(place): "x" for place in range(1025)}}):
        assert "items; it must have at most" in told(**fields)
    for prompt in ([5, *["x"] * 1000], ["x", *[5] * 1000], [[5], *["x"] * 1000], [[5, "x", "x"]]):
        with pytest.raises(ValidationError) as error:
            CompletionRequest.model_validate({"prompt": prompt})
        assert error.value.error_count() == 1, "the first that does not fit ends it"
    many = {"messages": [5] * 100_000}
    with pytest.raises(ApiError, match="100000 items; it must have at most 16384"):
        read(ChatRequest, json.dumps(many).encode())


def test_one_unknown_field_of_many_is_named() -> None:
    with pytest.raises(ApiError, match="unknown field 'new0'") as error:
        read(CompletionRequest, json.dumps({"prompt": "x", **{f"new{place}": 1 for place in range(9)}}).encode())
    assert error.value.param == "new0"
    assert "did you mean 'temperature'" in told(temprature=1)
    assert "stream_options.include" in told(stream_options={"include": 1})


def test_numbers_without_a_fraction_are_whole() -> None:
    found = completion(max_tokens=16.0, n=2.0, top_k=-1.0)
    assert (found.max_tokens, found.n, found.top_k) == (16, 2, -1)
    assert type(found.max_tokens) is int
    for value in (16.5, "16", True):
        assert "max_tokens is" in told(max_tokens=value)


def test_prompts_of_each_kind() -> None:
    for prompt in ("x", "", ["x", "y"], [1, 2], [[1, 2], [3]], []):
        assert completion(prompt=prompt).prompt == prompt
    for prompt, words in (
        (5, "is 5; give a text"),
        (None, "is None"),
        ([[1], "x"], "prompt.1 is 'x'"),
        ([True], "prompt.0 is True"),
    ):
        assert words in told(prompt=prompt)


def test_a_stop_that_is_empty_is_none() -> None:
    assert completion(stop="").stop in (None, [])
    assert completion(stop=["", "a", ""]).stop == ["a"]
    assert completion(stop="a").stop == ["a"]


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_values_that_ask_for_nothing(name: str) -> None:
    for value in (None, "", *(("x", 7) if NEUTRAL[name] is ANY else NEUTRAL[name])):
        assert name not in translated({name: value}, chat=False)
    if NEUTRAL[name] is not ANY:
        with pytest.raises(ApiError, match=f"{name} is 0.123, which this server does not do"):
            translated({name: 0.123}, chat=False)
        ignored: list[str] = []
        assert translated({name: 0.123}, chat=False, ignored=ignored) == {}
        assert ignored == [name]


def test_ours_wins_where_both_are_given() -> None:
    assert translated({"n_predict": 5, "max_tokens": 7}, chat=False) == {"max_tokens": 7}
    assert translated({"n_predict": 5, "max_tokens": None}, chat=False) == {"max_tokens": 5}
