"""Live costs: the curve follows what forwards take, wherever that can change no text, and nothing else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from specdec import Context, DraftSession, Engine, SamplingParams
from specdec.costs.curve import CostCurve
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import UNBATCHED, BatchLoad, Prices
from specdec.engine import clocks, decoding
from specdec.step import device_copies
from tests.fakes import Reciter
from tests.models import prompt_of
from tests.tiers import each_once

ROWS = [1, 2, 4, 8, 16, 32, 64]


def curve_of(row: float = 0.1, *, plain: float = 0.001) -> CostCurve:
    seconds = [plain * (1 + row * (n - 1)) for n in ROWS]
    return CostCurve(machine={}, rows=ROWS, lengths=[100, 900], seconds=[seconds, [2 * time for time in seconds]])


def run(live: LiveCosts, factors: dict[int, float], times: int = 400, length: int = 100) -> None:
    """Forwards in turn of so many rows, that take so many times what the curve said."""
    for _ in range(times):
        for rows, factor in factors.items():
            live.note(rows, length, factor * live.measured.at(length // 256 * 256 + 128, rows)[rows])


def ratios(live: LiveCosts, *rows: int) -> list[float]:
    """What forwards are said to take now, by what was measured."""
    now, then = live.now.at(100, 256), live.measured.at(100, 256)
    return [now[count] / then[count] for count in rows]


def test_nothing_is_changed_before_something_was_seen() -> None:
    curve = curve_of()
    live = LiveCosts(curve)
    assert live.now is live.measured is curve.now is curve
    live.note(0, 100, 1.0)
    live.note(10**9, 100, 1.0)
    assert live.now is curve


def test_a_machine_that_is_slower_in_all_has_the_same_prices() -> None:
    live = LiveCosts(curve_of())
    run(live, {1: 1.7, 4: 1.7, 8: 1.7})
    assert ratios(live, *range(1, 257)) == pytest.approx([1.7] * 256)
    assert live.now.steps(100, 64) == pytest.approx(live.measured.steps(100, 64))


def test_rows_that_became_dearer_are_known_to_be_and_others_by_the_nearest() -> None:
    live = LiveCosts(curve_of())
    run(live, {1: 0.9, 4: 0.9, 8: 1.4, 9: 1.4})
    assert ratios(live, 1, 4, 8, 9) == pytest.approx([0.9, 0.9, 1.4, 1.4], rel=0.04)
    assert ratios(live, 3, 12) == pytest.approx([0.9, 1.4], rel=0.12)  # never run
    assert 0.95 < ratios(live, 6)[0] < 1.35
    assert 1.1 < ratios(live, 200)[0] < 1.4


def test_another_process_s_moment_is_no_price() -> None:
    live = LiveCosts(curve_of())
    run(live, {1: 1.0, 4: 1.0})
    live.note(4, 100, 1.0)  # some hundred times as long
    run(live, {1: 1.0, 4: 1.0}, 32)
    assert ratios(live, 1, 4) == pytest.approx([1.0, 1.0], rel=0.02)


def test_what_is_over_is_forgotten() -> None:
    live = LiveCosts(curve_of())
    run(live, {4: 1.0, 8: 1.4}, 50)
    run(live, {4: 0.8}, 400)
    assert ratios(live, 4, 8) == pytest.approx([0.8, 0.8], rel=0.03), "eight rows would never be tried again"
    run(live, {4: 0.8, 8: 0.9}, 100)
    assert ratios(live, 4, 8) == pytest.approx([0.8, 0.9], rel=0.03)


def test_a_text_s_length_is_no_change_of_the_machine() -> None:
    live = LiveCosts(curve_of())
    run(live, {1: 1.0, 4: 1.0}, 100, length=100)
    run(live, {1: 1.0, 4: 1.0}, 100, length=800)
    assert ratios(live, 1, 4, 64) == pytest.approx([1.0] * 3)
    assert live.now.lengths == live.measured.lengths


def test_forwards_of_any_size_take_something() -> None:
    """An engine may let a step have more rows than are told apart, and many sequences share it."""
    live = LiveCosts(curve_of())
    for rows in (1, 2, 255, 256, 511, 5000):
        assert live.seconds(rows, 100) == pytest.approx(live.measured.at(128, rows)[-1])


def test_prices_follow() -> None:
    live = LiveCosts(curve_of())
    prices, batch_load = Prices(live), BatchLoad(4, 5)
    for prices.batch_load in (UNBATCHED, batch_load):
        sequences, _ = prices.batch_load
        before = prices.added(100, 8)
        run(live, {1: 1.0, 4: 1.0, 8: 2.0, 12: 2.0})
        assert prices.added(100, 8) > 1.3 * before
        assert prices.plain(100) == pytest.approx(live.now.reading(128, 4).seconds[sequences] / sequences)
        run(live, {1: 1.0, 4: 1.0, 8: 1.0, 12: 1.0})
        assert prices.added(100, 8) == pytest.approx(before, rel=0.05)


def target() -> Reciter:
    return Reciter(lambda text: (text[-1] * 7 + len(text) // 9) % 11, vocab_size=11)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target has the same curve, measured at some time."""
    monkeypatch.setattr("specdec.engine.engine.cost_curve", lambda *_, **__: curve_of())


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("apart", [False, True])
def test_the_curve_follows_forwards_and_on_a_device_whole_steps(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the host's clock sees only what a forward takes to launch, and the copy out waits for it."""
    now, noted = [0.0], list[float]()
    for module in (decoding, clocks):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def taking(seconds: float, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(device_copies, "is_apart", lambda device: apart)
    monkeypatch.setattr(device_copies, "copy_out", taking(10.0, device_copies.copy_out))
    monkeypatch.setattr(LiveCosts, "note", lambda live, rows, length, seconds: noted.append(seconds))
    engine = Engine(target(), None, "jacobi", policy="acceptance")
    monkeypatch.setattr(engine.target, "forward", taking(1.0, engine.target.forward))
    steps = engine.generate([3], 20).steps
    assert set(noted) == {11.0 if apart else 1.0}
    assert (len(noted) < len(steps)) == apart, "a device's first step of each kind is left out"


@pytest.mark.usefixtures("kept")
def test_it_is_followed_where_the_curve_was_measured_and_rows_round_alike() -> None:
    engine = Engine(target(), None, "none", policy="acceptance")
    assert engine.live is None, "nothing is weighed"
    first = engine.with_drafter("jacobi")
    assert first.live is not None
    assert first.live.measured is first.costs
    assert first.with_drafter("auto").live is engine.with_drafter("lookahead").live is first.live is engine.live
    assert Engine(target(), None, "jacobi", policy="acceptance", costs=curve_of()).live is None, "it was given"
    given = Engine(target(), None, "none", policy="acceptance", costs=curve_of())
    assert given.with_drafter("auto").live is None
    rounds = target()
    rounds.batch_invariant = False
    assert Engine(rounds, None, "jacobi", policy="acceptance").live is None


@pytest.mark.usefixtures("kept")
def test_without_a_policy_sizes_are_what_they_were_whatever_another_engine_measured() -> None:
    """What a session is told of costs is what lookahead's and jacobi's sizes follow from."""
    engine, told = Engine(target(), None, "jacobi", policy="off"), list[CostCurve]()
    start = engine.drafter.start

    def noted(context: Context) -> DraftSession:
        told.append(context.costs)
        return start(context)

    engine.drafter.start = noted  # type: ignore[method-assign]
    engine.generate([1, 2, 3], 5)
    assert engine.with_drafter("auto").live is engine.live is not None
    engine.generate([1, 2, 3], 5)
    assert told == [engine.costs] * 2


class Told(LiveCosts):
    """Keeps what it is told, and says of rows what it likes."""

    def __init__(self, dear: bool | None = None) -> None:
        super().__init__(curve_of())
        self.told: list[int] = []
        self.lengths: list[int] = []
        self._dear, self._rng = dear, random.Random(0)
        self._bend()

    def note(self, rows: int, length: int, seconds: float) -> None:
        self.told.append(rows)
        self.lengths.append(length)
        self._bend()

    def _bend(self) -> None:
        dear = self._rng.random() < 0.5 if self._dear is None else self._dear
        self.now = replace(curve_of(100.0 if dear else 0.0001))


@pytest.mark.slow
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("drafter", "temperature"), each_once(["auto", "jacobi", "token_recycling", "suffix_automaton"], [0.0, 0.8])
)
def test_whatever_rows_are_said_to_cost_the_text_is_plain_decoding_s(drafter: str, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3)
    prompts = [[size % 11 for size in prompt_of(size)] for size in (3, 9, 5, 7, 4)]
    truth = [Engine(target()).generate(prompt, 60, sampling).token_ids for prompt in prompts]
    engine = Engine(target(), None, drafter, policy="acceptance")
    engine.live = Told()
    assert [engine.generate(prompt, 60, sampling).token_ids for prompt in prompts] == truth
    assert [one.token_ids for one in engine.generate_batch(prompts, 60, sampling, batch=3)] == truth
    assert set(engine.live.told) != {1}


@pytest.mark.usefixtures("kept")
def test_rows_that_a_text_depends_on_follow_nothing() -> None:
    """Under ``reject`` and ``typical`` a seed's text follows from the rows, and so these must come again."""
    typical = {"acceptance": "typical", "allow_lossy": True}
    for options, follows in (({}, True), ({"acceptance": "reject"}, False), (typical, False)):
        sampling, rows = SamplingParams(temperature=0.5, seed=3, **options), []
        for dear in (True, False):
            engine = Engine(target(), None, "token_recycling", policy="acceptance")
            engine.live = Told(dear)
            rows.append([engine.generate([1, 2, 3], 40, sampling).stats.rows])
            rows[-1] += [one.stats.rows for one in engine.generate_batch([[1, 2, 3], [4]], 40, sampling, batch=2)]
        assert (rows[0] != rows[1]) == follows, options


@pytest.mark.usefixtures("kept")
def test_forwards_like_the_measured_ones_are_told_of() -> None:
    """Those of drafts, with the rows of all sequences; none with a piece of a prompt, or without some rows' logits."""
    engine = Engine(target(), None, "jacobi", policy="acceptance")
    engine.live = live = Told(dear=False)
    found = engine.generate([1, 2, 3], 20)
    assert live.told == found.stats.rows
    assert live.lengths[0] == 2
    assert live.lengths == sorted(set(live.lengths))
    live.told.clear()
    live.lengths.clear()
    reciter = engine.target
    assert isinstance(reciter, Reciter)
    reciter.forwards.clear()
    pair = engine.generate_batch([[1, 2, 3], [1, 2, 3, 4, 5]], 20, batch=2)
    assert sum(live.told) == sum(sum(one.stats.rows) for one in pair)
    assert live.told == reciter.forwards[1:], "the first one is the prompts'"
    assert live.lengths[0] == 3
