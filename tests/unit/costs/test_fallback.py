"""Fallback: what loses rests and is tried again, what wins is let be, and no token changes by it."""

from __future__ import annotations

import random
import re
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.kangaroo.session import KangarooSession
from specdec import Context, Draft, DraftSession, Engine, Observation, SamplingParams
from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import Rest
from specdec.drafter import DrafterWrapper
from specdec.drafting.registry import drafter_names, make_drafter
from specdec.engine.decoding import Decoding
from tests.fakes import Scripted, Spy
from tests.models import greedy, prompt_of, settings_of, target_of
from tests.tiers import each_once, turns
from tests.unit.costs.test_policy import curve_of

PROMPT = prompt_of(9)
SEQUENCES = 4


class Machine:
    """One on which a forward of ``rows`` takes ``plain * (1 + row * (rows - 1))`` seconds, and drafting ``drafting``.

    All three change as a test likes. What rows cost was measured when a row cost ``measured``. Every drafted step
    brings each sequence two tokens in turn with one and with three, for two rows of each; or what ``brings`` says.
    """

    def __init__(self, row: float = 0.1, *, measured: float | None = None, drafting: float = 0.0) -> None:
        self.plain, self.row, self.drafting = 1.0, row, drafting
        self.live = LiveCosts(curve_of(row=row if measured is None else measured))
        self.fallback = Fallback(self.live)
        self.brings = cycle([(2, 2), (1, 2), (3, 2), (2, 2)])  # tokens and rows of each sequence
        self.entry = False  # whether drafts go through a part of the forward, which takes a third less
        self.moment: float | None = None  # what the next forward takes more

    def forward(self, rows: int) -> float:
        seconds = self.plain * (1 + self.row * (rows - 1)) + (self.moment or 0.0)
        self.moment = None
        return seconds

    def run(self, count: int, *, sequences: int = SEQUENCES, drawn: bool = False) -> str:
        """So many steps: "d" for each that drafted, "." for each that was to be plain."""
        taken, self.spent, self.tokens = "", 0.0, 0
        for _ in range(count):
            rests = self.fallback.rests(sequences, drawn)
            taken += "." if rests else "d"
            tokens, rows = (1, 1) if rests else next(self.brings)
            tokens, rows, drafting = tokens * sequences, rows * sequences, 0.0 if rests else self.drafting
            seconds, whole = self.forward(rows), rests or not self.entry
            if whole:
                self.live.note(rows, 100, seconds)
            else:
                seconds /= 1.5
            self.fallback.note(
                sequences,
                drawn,
                tokens=tokens,
                length=100,
                rows=rows,
                whole=whole,
                drafting=drafting,
                seconds=seconds + drafting,
            )
            self.spent += seconds + drafting
            self.tokens += tokens
        return taken

    def ahead(self, sequences: int = SEQUENCES) -> float:
        """What the latest steps yielded, of what plain ones would have."""
        return self.tokens * self.forward(sequences) / sequences / self.spent


def machine_of(ahead: float, **options: Any) -> Machine:
    """One on which a drafted step yields so much of what a plain one does, by what drafting itself takes."""
    machine = Machine(**options)
    machine.drafting = 2 / ahead * machine.forward(SEQUENCES) - machine.forward(2 * SEQUENCES)
    return machine


def rests_of(taken: str) -> list[int]:
    """How long the rests are, a plain step by itself being none."""
    return [len(rest) for rest in taken.split("d") if len(rest) > 1]


def test_what_loses_rests_and_is_tried_more_and_more_rarely() -> None:
    machine = machine_of(0.95)
    taken = machine.run(8000)
    assert rests_of(taken)[1:5] == [256, 512, 1024, 2000]
    assert taken.index("..") < 100
    assert taken.count("d") < 200, "between them it drafts to be compared"
    assert machine.ahead() > 0.995


@pytest.mark.parametrize("ahead", [0.5, 0.7, 0.9])
def test_what_loses_much_rests_the_sooner_and_the_longer(ahead: float) -> None:
    machine = machine_of(ahead)
    assert machine.run(6000).index("..") < 40
    assert machine.ahead() > 0.98, "trying in vain is rare"


def test_what_wins_clearly_is_seldom_interrupted() -> None:
    taken = machine_of(2.0).run(2000)
    assert ".." not in taken
    assert 2000 / 66 < taken.count(".") < 2000 / 50, "to know what plain steps take now"


@pytest.mark.parametrize("ahead", [0.8, 1.3])
def test_forwards_that_are_like_no_measured_one_count_by_what_they_took(ahead: float) -> None:
    """As a draft's with an entry."""
    machine = Machine()
    machine.entry = True
    machine.drafting = 2 / ahead * machine.forward(SEQUENCES) - machine.forward(2 * SEQUENCES) / 1.5
    assert (".." in machine.run(1000)) == (ahead < 1)


def test_where_it_is_in_doubt_a_plain_step_is_taken_now_and_then() -> None:
    taken = machine_of(1.05).run(2000)
    assert ".." not in taken
    assert 2000 / 10 < taken.count(".") < 2000 / 8


def test_what_says_nothing_is_plain_enough() -> None:
    """A drafter that has no guess for every other step is not interrupted to know what a plain one takes."""
    machine = Machine(0.02)
    machine.brings = cycle([(1, 1), (4, 8)])
    assert machine.run(1000) == 1000 * "d"
    machine.drafting = 4.0
    assert ".." in machine.run(100), "though drafting for it counts"


def test_what_pays_later_is_found_out() -> None:
    machine = machine_of(0.8)
    assert ".." in machine.run(300)
    machine.drafting = 0.0
    assert ".." not in machine.run(3000)[-1500:]
    machine.drafting = 4.0
    assert ".." in machine.run(60), "and what no longer does, too"


@pytest.mark.few(2)
@pytest.mark.parametrize("slower", [2.0, 5.0, 20.0, 1000.0])
@pytest.mark.parametrize("sequences", [1, SEQUENCES])
def test_after_a_busy_spell_what_pays_is_tried_again(slower: float, sequences: int) -> None:
    """However much it lost meanwhile: while drafting is so much slower, and then is as it was."""
    machine = Machine()
    machine.run(1000, sequences=sequences)
    machine.drafting = slower * machine.forward(2 * sequences)
    assert ".." in machine.run(120, sequences=sequences)
    machine.drafting = 0.0
    taken = machine.run(2000, sequences=sequences)
    assert "d" in taken, "within the longest rest"
    assert ".." not in machine.run(1000, sequences=sequences), "and then it goes on"


def test_what_loses_most_is_tried_for_the_fewest_steps() -> None:
    """A try costs a hundredth of the longest rest, or six steps."""
    for slower, steps in ((0.95, 24), (0.5, 10), (0.1, 6)):
        machine = machine_of(slower)
        machine.run(4000)
        tries = [one.count("d") for one in re.split(r"\.\.+", machine.run(9000))]
        assert set(tries[1:-1]) == {steps}, slower


def test_a_rest_is_long_once_it_has_settled() -> None:
    """Before that it may end by itself, and a session is shown what it missed of it."""
    machine = machine_of(0.5)
    rests = [machine.fallback.rests(SEQUENCES, False) for _ in range(100) if machine.run(1)]
    first = rests.index(Rest.LONG)
    assert rests[first - 15 : first] == [Rest.STEP] * 15, "and one before the first of them was seen"
    assert set(rests[first:]) == {Rest.LONG}


def test_companies_are_apart() -> None:
    machine = machine_of(0.5)
    machine.run(300, sequences=8, drawn=True)
    assert machine.fallback.rests(8, True)
    assert machine.fallback.rests(9, True), "about as many"
    for others in ((8, False), (1, True), (4, True)):
        assert not machine.fallback.rests(*others)


def test_a_machine_that_is_slower_in_all_is_no_reason_to_rest() -> None:
    machine = machine_of(1.3)
    machine.run(300)
    machine.plain, machine.drafting = 3.0, 3 * machine.drafting
    assert max(rests_of(machine.run(400)), default=0) <= 16
    assert machine.run(400).count("d") > 340


def test_a_moment_of_another_process_is_no_reason_to_rest() -> None:
    machine = machine_of(1.1)
    for _ in range(60):
        machine.moment = 50.0
        assert ".." not in machine.run(20)


def test_a_clock_that_stands_still_ends_nothing() -> None:
    machine = Machine()
    machine.plain = 0.0
    machine.run(1000)
    machine.plain = 1.0
    machine.run(1000)


# What forwards take: quietly; with half of a core's arithmetic left; with half of the memory's bandwidth left.
QUIET, BUSY, STREAMING = (1.0, 0.05, 0.02), (1.1, 0.25, 0.05), (1.6, 0.02, 0.03)
CHAINS = {
    "always the same": [(2, 6)],
    "some": [(1, 4), (3, 4), (1, 6), (2, 6), (4, 4)],
    "bursts": [*[(1, 1)] * 30, *[(9, 12)] * 3],
    "hardly any": [*[(1, 3)] * 9, (2, 3)],
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("brings", "measured"), each_once(CHAINS, [QUIET, BUSY, STREAMING]))
def test_beside_a_neighbour_nothing_is_lost_and_after_it_all_is_as_before(
    brings: str, measured: tuple[float, float, float]
) -> None:
    """Whatever rows cost in the hour when they were measured."""
    machine, alone = Machine(measured=measured[1]), Machine(measured=QUIET[1])
    machine.brings, alone.brings = cycle(CHAINS[brings]), cycle(CHAINS[brings])
    alone.row, alone.drafting = QUIET[1:]
    alone.run(3000, sequences=1)
    for state in (QUIET, BUSY, QUIET, STREAMING, QUIET, BUSY):
        machine.plain, machine.row, machine.drafting = state
        machine.run(1500, sequences=1)
        assert machine.ahead(1) > 0.98, state
    machine.plain, machine.row, machine.drafting = QUIET
    machine.run(600, sequences=1)
    machine.run(3000, sequences=1)
    assert machine.ahead(1) > 0.97 * alone.ahead(1)


class AtRandom(Fallback):
    """Says anything."""

    def __init__(self) -> None:
        self._rng = random.Random(5)
        self.asked: list[tuple[int, bool]] = []
        self.noted: list[tuple[int, bool]] = []

    def rests(self, sequences: int, drawn: bool) -> Rest:
        self.asked.append((sequences, drawn))
        return self._rng.choice((Rest.NONE, Rest.NONE, Rest.STEP, Rest.LONG))

    def note(self, sequences: int, drawn: bool, **step: Any) -> None:
        assert step["tokens"] >= sequences
        assert step["rows"] >= sequences
        assert step["drafting"] >= 0
        assert step["seconds"] > step["drafting"]
        self.noted.append((sequences, drawn))


@pytest.mark.few(1)
@pytest.mark.parametrize(("drafter", "temperature"), turns(drafter_names(), [0.0, 0.8]))
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
        Scripted(lambda context, row_budget: Draft.chain([context.root, 1])),
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


def test_steps_with_a_piece_of_a_prompt_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, notes = list[int](), AtRandom.note

    def note(own: AtRandom, sequences: int, drawn: bool, *, rows: int, **step: Any) -> None:
        compared.append(rows)
        notes(own, sequences, drawn, rows=rows, **step)

    monkeypatch.setattr(AtRandom, "note", note)
    target = target_of("llama")
    engine = Engine(target, None, "prompt_lookup", costs=curve_of(row=0.1), max_rows=4, prefill_chunk=20)
    engine.fallback = AtRandom()
    most = list[int]()
    monkeypatch.setattr(target, "forward", lambda step, run=target.forward: most.append(step.rows) or run(step))
    engine.generate_batch([PROMPT, prompt_of(12, 3), prompt_of(90, 5)], 40, batch=2)
    assert max(compared) <= 2 * 4 < 20 < max(most), "a piece and another text's rows"


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

    def propose(self, row_budget: int) -> Draft:
        length = len(self._context.tokens)
        draft = self._inner.propose(1 if self._drafter.narrow and is_rest(length) else row_budget)
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

    def rests(self, sequences: int, drawn: bool) -> Rest:
        return Rest.STEP if is_rest(len(self.decoding.tokens)) else Rest.NONE

    def note(self, sequences: int, drawn: bool, **step: Any) -> None:
        pass


@pytest.mark.few(1)
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
            own, its = one._own.cache, other._own.cache
            size = own.length
            assert size == its.length
            for at in (own.keys, its.keys), (own.values, its.values):
                assert torch.equal(*(tensors[0][:, :, :size] for tensors in at))
