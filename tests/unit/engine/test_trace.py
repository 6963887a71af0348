"""Traces: what each step's tree was, and which drafter each token came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafters.union.drafter import Union, UnionConfig
from specdec import Draft, DrafterBase, Engine, SamplingParams
from specdec.costs.curve import roofline
from specdec.drafting.registry import drafter_names
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.results import Step
from tests.fakes import Reciter
from tests.models import prompt_of, settings_of, target_of
from tests.tiers import FEW, turns

TEXT = list(range(2, 60))


class Saying(DrafterBase):
    """Proposes, behind the text so far, one path by a rule."""

    needs_observe = draws = False

    def __init__(self, name: str, rule: Any) -> None:
        super().__init__(config=())
        self.name, self.rule = name, rule

    def start(self, context: Any) -> Any:
        return SayingSession(self.rule, context)


class SayingSession:
    def __init__(self, rule: Any, context: Any) -> None:
        self._rule, self._context = rule, context

    def propose(self, row_budget: int) -> Draft:
        context = self._context
        return Draft.chain([context.root, *self._rule(TEXT[len(context.tokens) :])][:row_budget])

    def observe(self, seen: Any) -> None:
        pass


def traced(drafter: Any, new: int = 12, **options: Any) -> list[Step]:
    engine = Engine(Reciter(lambda seen: TEXT[len(seen)]), None, drafter)
    sequence = engine.start(TEXT[:3], new, trace=True, **options)
    sequence.prefill()
    while sequence.finish_reason is None:
        sequence.step()
    assert sequence.tokens[3:] == TEXT[3 : 3 + new]
    return sequence.steps


def test_each_row_has_the_part_that_proposed_it_first() -> None:
    parts = [
        Saying("right", lambda after: after[:2]),
        Saying("longer", lambda after: after[:4]),
        Saying("wrong", lambda after: [after[0], 99]),
    ]
    first, *_ = traced(Union(UnionConfig(), parts))
    trace = first.trace
    assert trace is not None
    rows = dict(zip(range(6), zip(trace.tokens, trace.parents, trace.sources, strict=True), strict=True))
    by_token = {token: (parent, source) for token, parent, source in rows.values()}
    assert by_token[TEXT[2]] == (-1, "target")
    assert [by_token[token][1] for token in (TEXT[3], TEXT[4], TEXT[5], TEXT[6], 99)] == [
        *("right", "right", "longer", "longer"),
        "wrong",
    ]
    assert [trace.tokens[row] for row in trace.path] == TEXT[2:7]
    assert first.tokens == TEXT[3:8]
    assert trace.token_sources == ["right", "right", "longer", "longer", "target"]


def test_a_prediction_is_a_source() -> None:
    sources = [step.trace.token_sources for step in traced("none", prediction=TEXT[3:10]) if step.trace is not None]
    assert sources == [["prediction"] * 7 + ["target"], *[["target"]] * 4]
    beside = Saying("right", lambda after: after[:3])
    sources = [step.trace.token_sources for step in traced(beside, prediction=TEXT[3:10]) if step.trace is not None]
    assert sources == [["prediction"] * 7 + ["target"], ["right"] * 3 + ["target"]]


def test_a_stop_token_within_a_draft() -> None:
    engine = Engine(Reciter(lambda seen: TEXT[len(seen)]), None, Saying("right", lambda after: after[:8]))
    sequence = engine.start(TEXT[:3], 20, trace=True, stop_token_ids=[TEXT[6]])
    sequence.prefill()
    step = sequence.step()
    assert sequence.finish_reason == "stop"
    assert step.trace is not None
    assert step.tokens == TEXT[3:7]
    assert step.trace.token_sources == ["right"] * 4  # no bonus token was emitted
    assert [step.trace.tokens[row] for row in step.trace.path] == TEXT[2:6]


@pytest.mark.few(1)
@pytest.mark.parametrize(("drafter", "temperature"), turns(drafter_names(), [0.0, 0.8], first=(*FEW, "union")))
def test_every_drafter_s_traces_fit_its_steps(drafter: str, temperature: float, tmp_path: Path) -> None:
    """And change nothing; alone and in a batch, where one rests too."""
    target, prompt = target_of("llama"), prompt_of(9)
    sampling = SamplingParams(temperature=temperature, seed=1)
    known = {*drafter_names(), "target"}
    for options in settings_of(drafter, target, tmp_path)[:2]:
        engine = Engine(target, None, options, costs=roofline())
        plain = engine.generate(prompt, 16, sampling)
        assert all(step.trace is None for step in plain.steps)
        requests = [Request(prompt, 16, sampling, trace=number > 0) for number in range(2)]
        done = {}
        with target.active():
            for events in Scheduler(engine, requests).run():
                done |= {event.index: event.generation() for event in events if event.last}
        assert all(step.trace is None for step in done[0].steps)
        assert done[1].token_ids == plain.token_ids
        before = 0.0
        for step in done[1].steps:
            trace = step.trace
            assert trace is not None
            assert len(trace.tokens) == len(trace.parents) == len(trace.sources) <= step.rows
            assert len(trace.token_sources) == len(step.tokens) == len(trace.path)
            assert [trace.tokens[row] for row in trace.path[1:]] == list(step.tokens[:-1])
            assert {*trace.sources, *trace.token_sources} <= known
            assert before < trace.seconds
            before = trace.seconds


def test_a_stream_has_them_where_it_is_told(tiny_engine: Engine) -> None:
    engine = tiny_engine.with_drafter("prompt_lookup")
    for trace in (False, True):
        chunks = list(engine.stream("a b c a b c a b", 8, trace=trace))
        assert all((chunk.step is not None and chunk.step.trace is not None) == trace for chunk in chunks)
