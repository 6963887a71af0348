"""Fallback: what loses rests and is tried again, what wins is let be, and no token changes by it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.kangaroo import KangarooSession
from specdec import Context, Draft, DraftSession, Engine, Observation, SamplingParams
from specdec.decoding import Decoding
from specdec.drafter import DrafterWrapper
from specdec.fallback import Fallback
from specdec.live import LiveCosts
from specdec.registry import drafter_names, make_drafter
from tests.fakes import Scripted, Spy
from tests.models import greedy, prompt_of, settings_of, target_of
from tests.tiers import matrix
from tests.unit.test_policy import curve_of

PROMPT = prompt_of(9)
SEQUENCES = 4


def steps_of(
    fallback: Fallback,
    count: int,
    *,
    ahead: float,
    sequences: int = SEQUENCES,
    drawn: bool = False,
    whole: bool = True,
) -> str:
    """So many steps of drafted tokens that yield ``ahead`` of plain ones: "d", or "." for each that is to be plain.

    A drafted step brings two tokens for each sequence, and what it takes beside two rows for each is drafting. Every
    other one is as one without guesses where not all forwards are ``whole``, and the others bring three and take more.
    """
    taken = ""
    forward = curve_of(row=0.1).at(100, 64)
    for _ in range(count):
        if fallback.rests(sequences, drawn):
            taken += "."
            fallback.note(
                sequences, drawn, tokens=sequences, length=100, drafting=0.0, rows=sequences, seconds=forward[sequences]
            )
        else:
            taken += "d"
            each, seconds, rows = 2, forward[2 * sequences], 2 * sequences if whole else None
            if not whole and len(taken) % 2:
                each, seconds, rows = 1, forward[sequences], sequences
            elif not whole:
                each = 3
            drafting = each / ahead * forward[sequences] - seconds
            fallback.note(
                sequences, drawn, tokens=each * sequences, length=100, drafting=drafting, rows=rows, seconds=seconds
            )
    return taken


@pytest.fixture
def fallback() -> Fallback:
    return Fallback(LiveCosts(curve_of(row=0.1)))


def test_what_loses_rests_and_is_tried_more_and_more_rarely(fallback: Fallback) -> None:
    taken = steps_of(fallback, 5000, ahead=0.9)
    rests = [len(rest) for rest in taken.replace(".d.", "ddd").split("d") if len(rest) > 1]
    assert rests[:5] == [125, 250, 500, 1000, 1000], "four tokens a step"
    assert taken.index("..") < 350
    assert taken.count("d") < 1200, "between them it drafts to be compared"


def test_what_wins_clearly_is_never_interrupted(fallback: Fallback) -> None:
    assert steps_of(fallback, 2000, ahead=1.3) == 2000 * "d"


@pytest.mark.parametrize("ahead", [0.8, 1.3])
def test_forwards_that_are_like_no_measured_one_count_by_what_they_took(fallback: Fallback, ahead: float) -> None:
    """As a draft's with an entry, beside steps for which its drafter had nothing to say."""
    taken = steps_of(fallback, 1000, ahead=ahead, whole=False)
    assert (".." in taken) == (ahead < 1)


def test_where_it_is_in_doubt_a_plain_step_is_taken_now_and_then(fallback: Fallback) -> None:
    taken = steps_of(fallback, 2000, ahead=1.05)
    assert ".." not in taken
    assert 2000 / 18 < taken.count(".") < 2000 / 16


def test_what_pays_later_is_found_out(fallback: Fallback) -> None:
    steps_of(fallback, 300, ahead=0.8)
    assert ".." in steps_of(fallback, 300, ahead=0.8)
    assert ".." not in steps_of(fallback, 3000, ahead=1.5)[-1500:]
    taken = steps_of(fallback, 1500, ahead=0.8)
    assert ".." in taken, "and what no longer does, too"


def test_companies_are_apart(fallback: Fallback) -> None:
    steps_of(fallback, 300, ahead=0.8, sequences=8, drawn=True)
    assert fallback.rests(8, True)
    assert fallback.rests(9, True), "about as many"
    for others in ((8, False), (1, True), (4, True)):
        assert not fallback.rests(*others)


def test_rows_are_weighed_by_what_forwards_take_now(fallback: Fallback) -> None:
    """The measured curve says that drafting wins, and forwards of so many rows became twice as long."""
    live = LiveCosts(curve_of(row=0.1))
    fallback = Fallback(live)
    forward = curve_of(row=0.1).at(100, 64)
    for _ in range(200):
        live.note(SEQUENCES, 100, forward[SEQUENCES])
        live.note(2 * SEQUENCES, 100, 2 * forward[2 * SEQUENCES])
        rows = 2 * SEQUENCES
        fallback.note(SEQUENCES, False, tokens=rows, length=100, drafting=0.0, rows=rows, seconds=forward[rows])
        if fallback.rests(SEQUENCES, False) and fallback.rests(SEQUENCES, False):
            break
    else:
        pytest.fail("it never rests")
    assert ".." not in steps_of(Fallback(LiveCosts(curve_of(row=0.1))), 300, ahead=2 * forward[4] / forward[8])


class AtRandom(Fallback):
    """Says anything."""

    def __init__(self) -> None:
        self._rng = random.Random(5)
        self.asked: list[tuple[int, bool]] = []
        self.noted: list[tuple[int, bool]] = []

    def rests(self, sequences: int, drawn: bool) -> bool:
        self.asked.append((sequences, drawn))
        return self._rng.random() < 0.5

    def note(self, sequences: int, drawn: bool, **step: Any) -> None:
        assert step["tokens"] >= sequences
        assert step["rows"] is None or step["rows"] >= sequences
        assert step["drafting"] >= 0
        assert step["seconds"] > 0
        self.noted.append((sequences, drawn))


@pytest.mark.parametrize(("drafter", "temperature"), matrix(drafter_names(), [0.0, 0.8]))
def test_no_token_changes_by_rests(drafter: str, temperature: float, tmp_path: Path) -> None:
    target = target_of("llama")
    sampling = SamplingParams(temperature=temperature, acceptance="match" if temperature else "auto", seed=3)
    prompts = [PROMPT, prompt_of(5), prompt_of(12)]
    plain = [Engine(target).generate(prompt, 30, sampling).token_ids for prompt in prompts]
    for settings in settings_of(drafter, target, tmp_path):
        engine = Engine(target, None, settings, max_rows=24, policy="acceptance", costs=curve_of(row=0.001))
        engine.fallback = AtRandom()
        alone = engine.generate(PROMPT, 30, sampling)
        assert alone.token_ids == plain[0], settings
        assert len(engine.fallback.noted) == len(alone.steps), "whatever its drafts are"
        assert [one.token_ids for one in engine.generate_batch(prompts, 30, sampling, batch=2)] == plain, settings
        assert {drawn for _, drawn in engine.fallback.asked} == {temperature > 0}
        assert {sequences for sequences, _ in engine.fallback.asked} >= {1, 2}


def test_a_session_that_rests_is_neither_asked_nor_told() -> None:
    target, asked, seen = target_of("llama"), list[int](), list[int]()
    engine = Engine(target, None, "none", costs=curve_of(row=0.1))
    engine.drafter = Spy(
        Scripted(lambda context, room: Draft.chain([context.root, 1])),
        on_draft=lambda draft: asked.append(len(draft)),
        on_seen=lambda context, step: seen.append(len(context.tokens)),
    )
    engine.fallback = AtRandom()
    for batch in (False, True):
        found = engine.generate_batch([PROMPT], 40)[0] if batch else engine.generate(PROMPT, 40)
        assert found.token_ids == greedy("llama", PROMPT, 40)
        drafted = [step for step in found.steps[:-1] if step.rows > 1]
        assert asked == [2] * len(drafted)
        assert 5 < len(drafted) < len(found.steps) - 5, "both kinds"
        assert len(seen) in (len(asked), len(asked) - 1), "the last one ends the text"
        assert len(engine.fallback.noted) == len(found.steps)
        asked.clear()
        seen.clear()
        engine.fallback.noted.clear()


def test_rows_that_a_text_depends_on_are_there_whatever_time_they_take() -> None:
    target = target_of("llama")
    engine = Engine(target, None, "token_recycling", policy="acceptance", costs=curve_of(row=0.001))
    rejects = SamplingParams(temperature=0.8, acceptance="reject", seed=3)
    truth = [engine.generate(prompt, 30, rejects) for prompt in (PROMPT, prompt_of(5))]
    engine.fallback = AtRandom()
    again = [engine.generate(PROMPT, 30, rejects), engine.generate(prompt_of(5), 30, rejects)]
    together = engine.generate_batch([PROMPT, prompt_of(5)], 30, rejects, batch=2)
    for found in (again, together):
        assert [(one.token_ids, one.stats.rows) for one in found] == [(one.token_ids, one.stats.rows) for one in truth]
    assert not engine.fallback.asked


class Narrow(DrafterWrapper):
    """A drafter that has room for the root alone after texts of some lengths, and keeps its drafts after others."""

    def __init__(self, inner: object, narrow: bool) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.narrow = narrow
        self.drafts: list[tuple[int, list[int]]] = []

    def start(self, context: Context) -> NarrowSession:
        self.session = self.inner.start(context)
        return NarrowSession(self, self.session, context)


class NarrowSession:
    def __init__(self, drafter: Narrow, inner: DraftSession, context: Context) -> None:
        self._drafter, self._inner, self._context = drafter, inner, context

    def propose(self, room: int) -> Draft:
        length = len(self._context.tokens)
        draft = self._inner.propose(1 if self._drafter.narrow and is_rest(length) else room)
        if not is_rest(length):
            self._drafter.drafts.append((length, [*draft.tokens]))
        return draft

    def observe(self, seen: Observation) -> None:
        self._inner.observe(seen)


def is_rest(length: int) -> bool:
    return length % 7 > 2


class ByLength(Fallback):
    """Rests after texts of some lengths."""

    def __init__(self) -> None:
        self.decoding: Decoding

    def rests(self, sequences: int, drawn: bool) -> bool:
        return is_rest(len(self.decoding.tokens))

    def note(self, sequences: int, drawn: bool, **step: Any) -> None:
        pass


@pytest.mark.parametrize("drafter", ["kangaroo", "medusa"])
def test_who_taps_misses_no_hidden_state_by_rests(drafter: str, tmp_path: Path) -> None:
    """Drafts after a rest are those of a session that was asked all the time, and had no room."""
    target = target_of("llama")
    for settings in settings_of(drafter, target, tmp_path):
        told, rested = (Narrow(make_drafter(settings, target), narrow) for narrow in (True, False))
        engine = Engine(target, None, "none", max_rows=24)
        engine.drafter = told
        truth = engine.generate(PROMPT, 40)
        engine.drafter, engine.fallback = rested, ByLength()
        engine.fallback.decoding = decoding = engine.start(PROMPT, 40)
        with target.active():
            decoding.prefill()
            while decoding.finish_reason is None:
                decoding.step()
        found = decoding.result()
        assert found.token_ids == truth.token_ids
        assert found.stats.rows == truth.stats.rows
        assert rested.drafts == told.drafts
        assert any(len(tokens) > 1 for _, tokens in told.drafts), settings
        one, other = told.session, rested.session
        if isinstance(one, KangarooSession) and isinstance(other, KangarooSession) and one._adapter.config.attends:
            size = one._cache.length
            assert size == other._cache.length
            for at in (one._cache.keys, other._cache.keys), (one._cache.values, other._cache.values):
                assert torch.equal(*(tensors[0][:, :, :size] for tensors in at))


def test_a_clock_that_stands_still_ends_nothing(fallback: Fallback) -> None:
    """Then forwards that are like no measured one take no time at all, and drafting none."""
    for _ in range(2000):
        fallback.rests(1, False)
        fallback.note(1, False, tokens=2, length=100, drafting=0.0, rows=None, seconds=0.0)
    assert not fallback.rests(1, False)
