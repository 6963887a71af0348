"""First times: a graph that is recorded inside an answer changes no decision after it, whatever recording took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec import Context, Draft, Engine, SamplingParams
from specdec.costs.live_curve import LiveCosts
from specdec.engine import clocks, decoding
from specdec.step.first_time import FirstTimes
from tests import seam
from tests.fakes import Reciter, Scripted
from tests.launching import fused, launch
from tests.models import new_model, prompt_of, settings_of
from tests.tiers import each_once
from tests.unit.costs.test_policy import curve_of


class Clock:
    """Seconds that only what a test names takes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (decoding, clocks):
            patch.setattr(module, "perf_counter", lambda: self.now)

    def taking(self, seconds: Callable[..., float], function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.now += seconds(*arguments)
            return function(*arguments, **options)

        return call


def decisions(
    patch: pytest.MonkeyPatch, drafter: Any, sampling: SamplingParams | None, recording: float, batch: int
) -> list[list[tuple[int, bool, int]]]:
    """Per text and step its rows, whether a draft was asked for, and its tokens, where a recording takes so long."""
    with pytest.MonkeyPatch.context() as patch:
        clock, recorder = Clock(patch), launch(patch)
        patch.setattr(recorder, "record", clock.taking(lambda work: recording, recorder.record))
        target = fused(new_model("llama", torch.float64))
        curve = curve_of(row=0.02)
        patch.setattr(target, "forward", clock.taking(lambda block: curve.at(100, 256)[block.rows], target.forward))
        engine = Engine(target, None, drafter, max_rows=24, policy="acceptance", costs=curve)
        engine._follow(LiveCosts(curve))
        prompts = [prompt_of(20, seed) for seed in range(2)]
        # Some graphs are recorded here, and more of them in later texts.
        outs = [*engine.generate_batch(prompts, 40, sampling, batch=batch), engine.generate(prompts[0], 60, sampling)]
        assert len(recorder.made) > 3
        assert [step.first_time for out in outs for step in out.steps].count(True) > 1
        assert not outs[-1].steps[-1].first_time
        return [[(step.rows, step.first_time, len(step.tokens)) for step in out.steps] for out in outs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "sampling", "batch"),
    each_once(("token_recycling", "auto", "kangaroo"), (None, SamplingParams(temperature=0.8, seed=1)), (1, 2)),
)
def test_a_recording_of_ten_seconds_changes_no_decision(
    drafter: str, sampling: SamplingParams | None, batch: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fused(new_model("llama", torch.float64))
    options = settings_of(drafter, target, tmp_path)[0]
    once, again = (decisions(monkeypatch, options, sampling, seconds, batch) for seconds in (0.0, 10.0))
    assert once == again


def test_a_recording_within_a_draft_is_a_first_time_of_its_step() -> None:
    kinds = [False, True, False]

    def draft(context: Context, row_budget: int) -> Draft:
        if kinds and kinds.pop():
            with FirstTimes.during():
                pass
        return Draft.root(context.root)

    steps = Engine(Reciter(len), None, Scripted(draft)).generate([1, 2], 5).steps
    assert [step.first_time for step in steps] == [False, True, False, False, False]


WARMED = ("none", "eagle", "dflash", "lookahead", "token_recycling", "medusa", "kangaroo", "draft_model", "auto")


@pytest.mark.slow
@pytest.mark.parametrize("drafter", WARMED)
def test_nothing_is_recorded_in_an_answer_after_a_warm_up(
    drafter: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = launch(monkeypatch)
    target = fused(new_model("llama", torch.float64))
    for options in settings_of(drafter, target, tmp_path)[:2]:
        engine, before = Engine(target, None, options, max_rows=32), len(recorder.made)
        engine.warm_up(2)
        made = len(recorder.made)
        assert made - before < 100, "bounded"
        outs = engine.generate_batch([prompt_of(9, seed) for seed in range(2)], 20, batch=2)
        outs.append(engine.generate(prompt_of(9), 20))
        assert len(recorder.made) == made, options
        assert not any(step.first_time for out in outs for step in out.steps)


def test_on_a_cpu_there_is_nothing_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    target = fused(new_model("llama", torch.float64))
    monkeypatch.setattr(target, "forward", None)
    Engine(target, None, "lookahead").warm_up(8)


def test_the_first_launch_of_a_kind_is_a_first_time_where_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch)
    target = fused(new_model("llama", torch.float64), attention="flash")
    counts = list[int]()
    for rows in (3, 4, 9, 3, 10):
        before = FirstTimes.seen
        with target.active():
            seam.text(target, capacity=1, rows=16).run([1] * rows)
        counts.append(FirstTimes.seen - before)
    assert counts == [2, 0, 2, 0, 0]
