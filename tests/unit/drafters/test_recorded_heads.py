"""Medusa's guesses as a graph, on a device that is not there, against guesses that are launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.medusa.drafter import Medusa, MedusaSession
from drafters.medusa.recorded_heads import RecordedHeads
from specdec import Engine, SamplingParams
from specdec.drafting.registry import make_drafter
from specdec.errors import SpecdecWarning
from tests.launching import Recorder, fused, launch
from tests.models import new_model, prompt_of, settings_of

PROMPT, NEW = prompt_of(12), 24
TEMPERED = SamplingParams(temperature=0.8, seed=4)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return launch(monkeypatch)


def medusas(folder: Path) -> list[tuple[Engine, Medusa]]:
    target = fused(new_model("llama", torch.float64))
    made = list[tuple[Engine, Medusa]]()
    for options in settings_of("medusa", target, folder):
        drafter: Any = make_drafter({"name": "medusa", **options}, target)
        made.append((Engine(target, None, drafter, max_rows=16, policy="off"), drafter))
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("sampling", [None, TEMPERED, SamplingParams(temperature=1.7, seed=9)])
def test_guesses_are_those_that_are_launched(
    sampling: SamplingParams | None, tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers that are read, to the last bit, in texts of several seeds and lengths."""
    readback, compared = MedusaSession.readback, [0]

    def both(own: MedusaSession, step: Any) -> Any:
        found, kept = readback(own, step), own._drafter.recorded
        own._drafter.recorded = None
        expected = readback(own, step)
        own._drafter.recorded = kept
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert torch.equal(found, expected)
            compared[0] += 1
        return found

    monkeypatch.setattr(MedusaSession, "readback", both)
    for engine, drafter in medusas(tmp_path):
        assert drafter.recorded is not None
        replays = sum(recorder.replays.values())
        engine.generate_batch([PROMPT, PROMPT[:5]], NEW, sampling, batch=2)
        engine.generate(PROMPT[:7], NEW, sampling)
        steps = sum(recorder.replays.values()) - replays
        assert steps > 2 * NEW, "the target's steps, and one launch for each readback"
    assert compared[0] > 60


@pytest.mark.few(1)
@pytest.mark.parametrize("filtered", [False, True])
def test_what_filters_is_launched(filtered: bool, tmp_path: Path, recorder: Recorder, monkeypatch: Any) -> None:
    """A draw under ``top_p`` is ranked by operations that no graph has."""
    asked, guess = [0], RecordedHeads.guess

    def counted(own: RecordedHeads, *arguments: Any) -> Any:
        asked[0] += 1
        return guess(own, *arguments)

    monkeypatch.setattr(RecordedHeads, "guess", counted)
    sampling = SamplingParams(temperature=0.8, seed=4, top_p=0.9 if filtered else 1.0)
    engine, _ = medusas(tmp_path)[0]
    plain = Engine(engine.target).generate(PROMPT, NEW, sampling).token_ids
    assert engine.generate(PROMPT, NEW, sampling).token_ids == plain
    assert (asked[0] == 0) == filtered


@pytest.mark.slow
def test_a_warm_up_records_them(tmp_path: Path, recorder: Recorder) -> None:
    engine, _ = medusas(tmp_path)[0]
    engine.warm_up(2)
    made = len(recorder.made)
    for sampling in (None, TEMPERED):
        engine.generate_batch([PROMPT, PROMPT[:5]], NEW, sampling, batch=2)
    assert len(recorder.made) == made


@pytest.mark.slow
def test_guesses_that_cannot_be_recorded_are_launched(tmp_path: Path, recorder: Recorder) -> None:
    engine, drafter = medusas(tmp_path)[0]
    engine.target.warm_up(16, sequences=1, taps=drafter.taps)  # type: ignore[attr-defined]
    expected = engine.generate(PROMPT, NEW)
    _, other = medusas(tmp_path)[0]
    again = Engine(engine.target, None, other, max_rows=16, policy="off")
    recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(SpecdecWarning, match="no CUDA graph of them can be recorded: RuntimeError: operation not"):
        found = again.generate(PROMPT, NEW)
    assert other.recorded is not None
    assert str(other.recorded.failed).startswith("RuntimeError")
    assert found.token_ids == expected.token_ids
    assert found.stats.rows == expected.stats.rows
