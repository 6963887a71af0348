"""Structured output at random: grammars allow nothing but what fits, and drafts change no text under them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from specdec import Engine
from specdec.engine.requests import Request
from specdec.engine.scheduler import Handle, Scheduler
from specdec.serve.config import ServeConfig
from specdec.serve.errors import ApiError
from specdec.serve.fields import CompletionRequest
from specdec.serve.json_grammar import Grammars, JsonGrammar
from specdec.serve.reading import read
from specdec.serve.service import Service
from specdec.serve.structured import Structured
from tests.random_schemas import random_schema
from tests.walks import walk

CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def grammar_of(grammars: Grammars, schema: Any) -> JsonGrammar | None:
    """The grammar of a random schema; None where it is refused, or is none."""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        return Structured(lambda: grammars).of_schema(schema)
    except (ApiError, jsonschema.SchemaError):
        return None


@pytest.mark.slow
def test_random_texts_of_a_grammar_fit_its_schema(tiny_engine: Engine) -> None:
    grammars = Grammars(tiny_engine.tokenizer, tiny_engine.target.vocab_size, tiny_engine.target.eos_ids)
    checked = followed = 0
    for seed in range(260):
        dice = random.Random(seed)
        schema = random_schema(dice)
        grammar = grammar_of(grammars, schema)
        if grammar is None:
            continue
        followed += 1
        for _ in range(3):
            text = walk(grammars, grammar, dice, 100)
            if text is not None:
                jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=CHECKER)
                checked += 1
    assert followed > 130, "most schemas are refused"
    assert checked > 2 * followed, "few texts end"


def short_schemas(grammars: Grammars) -> list[tuple[Any, str]]:
    """Schemas that are followed, each with a short text of its grammar."""
    found = []
    for seed in range(1000, 1060):
        dice = random.Random(seed)
        schema = random_schema(dice)
        grammar = grammar_of(grammars, schema)
        text = None if grammar is None else walk(grammars, grammar, dice, 20)
        if text is not None:
            found.append((schema, text))
    return found


# Schemas whose texts end soon, whatever a model likes best.
ENDING: list[tuple[Any, str]] = [
    ({"type": "boolean"}, "true"),
    ({"enum": ["left", "right"]}, '"left"'),
    ({"const": {"a": [1, 2]}}, '{"a":[1,2]}'),
]


@dataclass
class Asked:
    """A request that runs, and its prompt, end and schema."""

    body: dict[str, Any]
    schema: Any
    handle: Handle


class Server(RuleBasedStateMachine):
    """Requests with grammars come, run beside others and go; what ends is plain constrained decoding's."""

    engine: Engine
    service: Service
    schemas: list[tuple[Any, str]]  # each with a text of its grammar
    plain: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.engine, batch=3)
        self.running: list[Asked] = []

    def requests(self, body: dict[str, Any], drafter: str) -> list[Request]:
        fields = {**body, "speculation": {"drafter": drafter}}
        planner = self.service.lanes[0].planner
        return planner.completion(read(CompletionRequest, json.dumps(fields).encode())[0]).requests

    @initialize()
    def submit_what_ends(self) -> None:
        for which in range(len(ENDING)):
            self.submit(which, "prompt_lookup", earlier=True, temperature=0.0, end={}, budget=32)

    @rule(
        which=st.integers(0, 999),
        drafter=st.sampled_from(
            ("auto", "jacobi", "lookahead", "prompt_lookup", "suffix_automaton", "token_recycling")
        ),
        earlier=st.booleans(),
        temperature=st.sampled_from((0.0, 0.0, 0.8, 1.5)),
        end=st.sampled_from(({}, {}, {"ignore_eos": True}, {"min_tokens": 16}, {"min_tokens": 3}, {"stop": ["}"]})),
        budget=st.integers(16, 32),
    )
    def submit(
        self, which: int, drafter: str, earlier: bool, temperature: float, end: dict[str, Any], budget: int
    ) -> None:
        schema, text = self.schemas[which % len(self.schemas)]
        prompt = self.engine.encode("answer = ")
        if earlier:  # so that drafters propose it once more, with its end
            prompt = [*prompt, *([*self.engine.encode(text)[1:], *self.engine.target.eos_ids] * 3)]
        body = {"prompt": prompt, "temperature": temperature, "seed": which, "max_tokens": budget, **end}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        (request,) = self.requests(body, drafter)
        self.running.append(Asked(body, schema, self.scheduler.submit(request)))

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.scheduler.step())

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.running))
        self.scheduler.cancel(asked.handle)
        self.running.remove(asked)

    def take(self, events: list[Any]) -> None:
        for event in events:
            assert event.error is None, event.error
            if event.last:
                found = next((one for one in self.running if one.handle.index == event.index), None)
                if found is not None:
                    self.running.remove(found)
                    self.check(found, event.decoding.result())

    def check(self, asked: Asked, found: Any) -> None:
        key = json.dumps(asked.body)
        if key not in self.plain:
            (request,) = self.requests(asked.body, "none")
            alone = Scheduler(self.engine, batch=1)
            alone.submit(request)
            while not alone.idle:
                for event in alone.step():
                    assert event.error is None, event.error
                    if event.last:
                        self.plain[key] = event.decoding.result()
        plain = self.plain[key]
        assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
        if not self.engine.target.eos_ids.isdisjoint(found.token_ids):
            value = json.loads(self.engine.tokenizer.decode(found.token_ids, skip_special_tokens=True))
            jsonschema.validate(value, asked.schema, jsonschema.Draft202012Validator, format_checker=CHECKER)

    def teardown(self) -> None:
        while not self.scheduler.idle:
            self.take(self.scheduler.step())
        assert not self.running


@pytest.mark.parametrize("examples", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_drafts_change_no_text_under_a_grammar(tiny_engine: Engine, examples: int) -> None:
    served, texts = Service(tiny_engine, ServeConfig(model="tiny")), dict[str, Any]()
    asked = [*ENDING, *short_schemas(served.lanes[0]._grammars)]

    class Machine(Server):
        engine, service, plain, schemas = tiny_engine, served, texts, asked

    check = settings(max_examples=examples, stateful_step_count=12, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Machine, settings=check)
    ended = [one for one in texts.values() if one.finish_reason == "eos"]
    assert len(ended) >= len(ENDING)
