"""Policy: rows are kept while they pay, drafters that lose are left alone, and the text stays the target's."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from specdec import Context, Draft, DrafterBase, Engine, Hints, Observation, SamplingParams
from specdec.costs.curve import CostCurve, roofline
from specdec.costs.measuring import describe
from specdec.costs.policy import AcceptancePolicy, Patience, check_policy
from specdec.costs.prices import UNBATCHED, BatchLoad, Prices
from specdec.drafting.registry import drafter_names
from specdec.errors import ConfigError
from tests.fakes import Oracle, Scripted, Spy
from tests.models import greedy, prompt_of, settings_of, target_of
from tests.tiers import turns

PROMPT = prompt_of(9)


def curve_of(*, row: float, plain: float = 1.0) -> CostCurve:
    """A plain step takes ``plain`` seconds, and every further row ``row`` plain steps."""
    rows = [1, 2, 4, 8, 16, 32, 64]
    return CostCurve(machine={}, rows=rows, lengths=[100], seconds=[[plain * (1 + row * (n - 1)) for n in rows]])


def test_prices_are_the_curve_s_wherever_it_was_read_before() -> None:
    curve = CostCurve(machine={}, rows=[1, 4, 64], lengths=[100, 900], seconds=[[1.0, 2.0, 9.0], [2.0, 2.5, 30.0]])
    reads = [
        (length, most, batch_load)
        for length in (10, 700)
        for batch_load in (UNBATCHED, BatchLoad(3, 7))
        for most in (40, 2)
    ]
    prices = Prices(curve)
    for before in reads:
        for length, most, batch_load in reads:
            for place, rows, prices.batch_load in (before, (length, most, batch_load)):
                found = prices.plain(place), prices.step(place, rows)
            sequences, beside = batch_load
            taken = curve.at(length // 256 * 256 + 128, 64)
            plain = taken[sequences] / sequences
            assert found == pytest.approx((plain, 1 + (taken[beside + most] - taken[beside + 1]) / plain))


def test_readings_of_a_curve_do_not_pile_up() -> None:
    """A service meets texts of ever new lengths; what is read again is read the same."""
    curve = curve_of(row=0.25)
    first = curve.reading(128, 20)
    assert curve.reading(128, 31) is first
    for length in range(3000):
        curve.reading(length, 32)
    assert len(curve._readings) <= 512
    assert curve.reading(128, 20) == first
    assert first.seconds == pytest.approx([0.0, *(1 + 0.25 * (rows - 1) for rows in range(1, 257))])
    assert first.cheapest == pytest.approx([0.25] * 256 + [math.inf])
    assert len(curve.reading(128, 300).seconds) > 300


def test_rows_that_cost_nothing_more_are_taken() -> None:
    """Where eight take less than six do, nobody stops at six, in a crowd as little as alone."""
    rows, times = [1, 4, 6, 8, 9, 64], [1.0, 1.3, 2.0, 1.6, 2.4, 24.0]
    curve = CostCurve(machine={}, rows=rows, lengths=[100], seconds=[times])
    prices = Prices(curve)
    assert prices.keep([0.1] * 20, 100, base=1) == 7
    assert [prices.rows(100, steps, 20) for steps in (1.5, 1.7, 2.3)] == [4, 8, 8]
    prices.batch_load = BatchLoad(6, 5)
    assert prices.added(100, 3) == pytest.approx(0.0)
    prices.batch_load = BatchLoad(8, 7)  # whose plain step is one of eight: what six take makes the ninth no cheaper
    assert prices.added(100, 2) == pytest.approx(0.8 / (1.6 / 8))


def test_the_cheapest_row_is_one_that_may_still_come() -> None:
    """Beside others' rows as well: what is behind them costs nothing any more."""
    curve = CostCurve(machine={}, rows=[1, 2, 3, 4, 64], lengths=[100], seconds=[[1.0, 2.0, 2.1, 3.1, 63.1]])
    prices = Prices(curve)
    assert prices.least(100, 8) == pytest.approx(0.1)
    prices.batch_load = BatchLoad(2, 2)
    assert prices.least(100, 8) == pytest.approx(1.0)  # a plain step of two takes two, a sequence's share is one


def test_as_many_rows_as_bring_most_over_their_price() -> None:
    """Dear rows are taken for those behind them, and none where all together bring too little, or no number."""

    def kept(gains: list[float], prices: list[float], least: float = 0.0) -> int:
        seconds = [1.0, *(1.0 + price for price in prices)]
        curve = CostCurve(machine={}, rows=range(1, 2 + len(prices)), lengths=[100], seconds=[seconds])
        return Prices(curve).keep(gains, 100, least=least)

    assert kept([0.9, 0.5, 0.3], [0.4, 0.8, 1.2]) == 2
    assert kept([0.1, 0.1, 0.9], [0.3, 0.4, 0.5]) == 3
    assert kept([0.9, 0.5], [0.4, 0.8], least=0.6) == 0
    assert kept([0.1, 0.3], [0.4, 0.8], least=-0.5) == 1, "where rows are of use besides"
    assert kept([0.5], [0.5]) == kept([], [1.0]) == kept([math.nan], [0.1]) == 0


def test_rows_are_kept_while_they_pay() -> None:
    prices = Prices(curve_of(row=0.25))  # and a token takes a second, so far
    assert prices.rate == pytest.approx(1.0)
    assert prices.keep([0.9, 0.5, 0.26, 0.24, 0.1], 0) == 3
    assert prices.keep([0.2, 0.2], 0) == 0
    assert prices.keep([], 0) == 0


def test_a_dear_row_is_kept_for_those_behind_it() -> None:
    steps = CostCurve(machine={}, rows=[1, 2, 3, 4], lengths=[100], seconds=[[1.0, 1.5, 1.5, 1.5]])
    assert Prices(steps).keep([0.3, 0.3, 0.3], 0) == 3


def test_rows_that_are_there_anyway_are_not_priced() -> None:
    steps = CostCurve(machine={}, rows=[1, 2, 8], lengths=[100], seconds=[[1.0, 1.5, 1.5]])
    assert Prices(steps).keep([0.3], 0) == 0
    assert Prices(steps).keep([0.3], 0, base=4) == 1


def test_the_rate_makes_rows_dearer() -> None:
    policy = AcceptancePolicy(curve_of(row=0.25))
    for _ in range(50):
        policy.learn(Draft.chain(range(5)), range(5), 0)  # 2.5 tokens a second, by the curve
    assert policy.prices.rate == pytest.approx(2.5, rel=0.1)
    assert policy.prices.keep([0.9, 0.65, 0.55], 0) == 2


def test_patience_doubles() -> None:
    patience = Patience(2, 16)
    tries = [step for step in range(80) if patience.due()]
    assert [after - before for before, after in pairwise(tries)] == [4, 8, 16, 16, 16, 16]
    patience.paid()
    assert [patience.due(), patience.due()] == [False, True]


def test_no_room_is_no_room() -> None:
    assert AcceptancePolicy(curve_of(row=0.1)).row_budget(1, 0) == 1


def spend(policy: AcceptancePolicy, accepted: int, steps: int) -> list[int]:
    """The rooms that a drafter gets which fills them, its first rows being right."""
    rooms = []
    for _ in range(steps):
        rooms.append(policy.row_budget(9, 0))
        path = range(min(1 + accepted, rooms[-1]))
        policy.learn(Draft.chain(range(rooms[-1])), path, 0)
    return rooms


def test_a_drafter_that_is_never_right_rests_and_is_tried_with_one_row_and_more_and_more_rarely() -> None:
    rooms = spend(AcceptancePolicy(curve_of(row=0.1)), 0, 80)
    tries = [step for step, row_budget in enumerate(rooms) if row_budget > 1]
    assert rooms[0] == 8  # all that 0.75 pays for
    assert [after - before for before, after in pairwise(tries)] == [1, 2, 4, 8, 16, 32]
    assert {rooms[step] for step in tries[1:]} == {2}


def test_a_try_has_all_rows_that_cost_no_more_than_one() -> None:
    """The balance is what the first row costs, and rounding takes none of the others away."""
    for turn in range(1, 40):
        seconds = [turn * 0.0013 * steps for steps in (1.0, 1.1 + turn / 70, 1.1 + turn / 70, 9.0)]
        policy = AcceptancePolicy(CostCurve(machine={}, rows=[1, 2, 6, 7], lengths=[100], seconds=[seconds]), 1)
        assert set(spend(policy, 0, 20)[1:]) == {1, 6}


def test_a_gain_is_tokens_less_the_price_of_their_time() -> None:
    prices = Prices(curve_of(row=0.25))
    assert prices.gain(2.0, 0, 5) == pytest.approx(2.0 - 1.0)
    assert prices.gain(2.0, 0, 5, base=3, drafting=0.2) == pytest.approx(2.0 - 0.5 - 0.2)
    prices.rate = 1.5
    assert prices.gain(2.0, 0, 5, base=3, drafting=0.2) == pytest.approx(2.0 - 1.5 * 0.7)
    assert prices.gain(2.0, 0, 5, base=3, drafting=0.2, rate=1.0) == pytest.approx(2.0 - 0.7)


def test_a_drafter_that_is_right_again_gets_its_rows_back() -> None:
    policy = AcceptancePolicy(curve_of(row=0.1))
    spend(policy, 0, 40)
    rooms = spend(policy, 4, 60)
    assert rooms[-30:] == [9] * 30
    assert spend(policy, 0, 4) == [9, 9, 9, 6]  # what it has saved up carries it a little way, and no further


def test_rows_are_paid_for_by_the_measured_curve() -> None:
    """Four rows are nearly free here, and the fifth costs four plain steps."""
    steps = CostCurve(machine={}, rows=[1, 4, 5], lengths=[100], seconds=[[1.0, 1.06, 5.0]])
    policy = AcceptancePolicy(steps)
    assert policy.row_budget(9, 0) == 4
    assert set(spend(policy, 1, 50)) == {4}


def test_fixed_costs_are_paid_for_in_time() -> None:
    """Four rows of a small model take as long as four of ten steps of a tiny one, and nothing beside a large one's."""
    tiny, large = curve_of(row=0.1, plain=0.001), curve_of(row=0.1)
    assert (AcceptancePolicy(tiny).row_budget(20, 0), AcceptancePolicy(tiny, 4).row_budget(20, 0)) == (7, 3)
    assert AcceptancePolicy(large, 4).row_budget(20, 0) == 8
    assert Prices(tiny).drafting(4, 0) == pytest.approx(0.4)
    assert Prices(tiny).drafting(4, 0, cost=0.5) == pytest.approx(0.9)


def test_what_a_model_computed_for_a_draft_is_paid_for() -> None:
    """Half a plain step for each draft: two in vain empty the account, whether or not a row came of them."""
    for tokens in ([1], [1, 2]):
        policy = AcceptancePolicy(curve_of(row=0.01))
        rooms = []
        for _ in range(4):
            rooms.append(policy.row_budget(9, 0))
            cost = 0.5 if rooms[-1] > 1 else 0.0
            policy.learn(Draft(tokens, range(-1, len(tokens) - 1), hints=Hints(cost=cost)), [0], 0)
        assert rooms == [9, 9, 2, 1]


def test_rows_that_cost_next_to_nothing_are_not_withheld() -> None:
    assert set(spend(AcceptancePolicy(curve_of(row=0.002)), 0, 30)) == {9}


def test_silence_costs_nothing() -> None:
    policy = AcceptancePolicy(curve_of(row=0.1))
    for _ in range(50):
        assert policy.row_budget(8, 0) == 8
        policy.learn(Draft.chain([1]), [0], 0)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "temperature"), turns(drafter_names(), [0.0, 0.8]))
def test_acceptance_changes_no_token_and_needs_no_clock(drafter: str, temperature: float, tmp_path: Path) -> None:
    """Twice the same rows, step by step, be they nearly free or dear."""
    target = target_of("llama")
    sampling = SamplingParams(temperature=temperature, acceptance="match" if temperature else "auto", seed=3)
    plain = Engine(target).generate(PROMPT, 40, sampling).token_ids
    for settings in settings_of(drafter, target, tmp_path):
        for row in (0.001, 0.1):
            engine = Engine(target, max_rows=24, policy="acceptance", costs=curve_of(row=row, plain=0.001))
            first, second = (engine.with_drafter(settings).generate(PROMPT, 40, sampling) for _ in range(2))
            assert first.token_ids == second.token_ids == plain, settings
            assert first.stats.rows == second.stats.rows


class Eager(DrafterBase):
    """Always proposes as many wrong tokens as it may."""

    name = "eager"
    Config = dict

    def start(self, context: Context) -> EagerSession:
        return EagerSession(context)


class EagerSession:
    def __init__(self, context: Context) -> None:
        self._context = context

    def propose(self, row_budget: int) -> Draft:
        return Draft.chain([self._context.root] * min(row_budget, 20))

    def observe(self, seen: Observation) -> None:
        pass


def test_the_engine_leaves_a_losing_drafter_alone_and_lets_a_winning_one_be() -> None:
    target = target_of("llama")
    truth = greedy("llama", PROMPT, 60)
    lost = Engine(target, None, Eager(), policy="acceptance", costs=curve_of(row=0.5)).generate(PROMPT, 60)
    assert lost.token_ids == truth
    assert lost.stats.rows_per_step < 4
    free = Engine(target, None, Eager()).generate(PROMPT, 60)
    assert free.stats.rows_per_step > 15
    oracle = Oracle([*PROMPT, *truth], target.vocab_size, steady=True)
    won = Engine(target, None, oracle, policy="acceptance", costs=curve_of(row=0.001)).generate(PROMPT, 60)
    assert won.token_ids == truth
    assert won.stats.tokens_per_step > 4


def test_what_failed_for_long_is_neither_asked_nor_told_between_its_tries() -> None:
    """At first it is, as it may be right soon, and needs what it learns."""
    target, asked, told, most = target_of("llama"), list[int](), list[int](), 120
    truth = greedy("llama", PROMPT, most)
    text = [*PROMPT, *truth]
    wrong = Scripted(lambda context, rows: Draft.chain([context.root, (text[len(context.tokens)] + 1) % 32][:rows]))
    spy = Spy(wrong, on_draft=lambda draft: asked.append(len(draft)), on_seen=lambda *_: told.append(1))
    found = Engine(target, None, spy, policy="acceptance", costs=curve_of(row=0.5)).generate(PROMPT, most)
    assert found.token_ids == truth
    assert [rows for rows in asked if rows > 1] == [rows for rows in found.stats.rows if rows > 1]
    tries = [step for step, rows in enumerate(found.stats.rows) if rows > 1]
    assert [after - before for before, after in pairwise(tries)] == [1, 2, 4, 8, 16, 32, 64][: len(tries) - 1]
    last = next(at for at, (before, after) in enumerate(pairwise(tries)) if after - before == 16)
    assert len(asked) - sum(rows > 1 for rows in asked) < tries[last] + 1, "none since"
    assert len(told) in (len(asked), len(asked) - 1)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What asked for the target's curve: the engine, each time with the file that it named."""
    calls: list[object] = []

    def curve(target: object, file: object = None, *, progress: object = None) -> CostCurve:
        calls.append(file)
        return curve_of(row=0.1)

    monkeypatch.setattr("specdec.engine.engine.cost_curve", curve)
    return calls


def test_the_curve_is_read_when_the_engine_is_made_and_only_where_rows_are_weighed(kept: list[object]) -> None:
    target = target_of("llama")
    for drafter, policy in (("none", "acceptance"), ("lookahead", "off")):
        engine = Engine(target, None, drafter, policy=policy)
        engine.generate(PROMPT, 3)
        assert engine.row_policy() is None
        assert engine.costs == roofline()
    assert kept == []
    engine = Engine(target, None, "none", policy="acceptance").with_drafter("jacobi")
    assert kept == [None]
    assert isinstance(engine.row_policy(), AcceptancePolicy)
    assert engine.row_policy() is not engine.row_policy(), "one sequence's account is another's"
    other = engine.with_drafter("lookahead")
    other.generate(PROMPT, 3)
    assert other.with_drafter("auto", policy="off").row_policy() is not None, "it cannot choose rows without prices"
    assert kept == [None], "what is known is not read again"
    assert isinstance(Engine(target, None, "auto").row_policy(), AcceptancePolicy)
    assert kept == [None, None]


def test_a_cost_file_is_a_policy(kept: list[object], tmp_path: Path) -> None:
    curve_of(row=0.1).save(tmp_path / "mine.json")
    engine = Engine(target_of("llama"), None, "jacobi", policy="acceptance")
    by_file = engine.with_drafter("jacobi", policy=str(tmp_path / "mine.json"))
    assert kept == [None, str(tmp_path / "mine.json")]
    assert isinstance(by_file.row_policy(), AcceptancePolicy)
    by_file.with_drafter("lookahead")
    assert len(kept) == 2


def test_progress_is_shown_while_the_curve_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("specdec.costs.measuring.cache_folder", lambda: tmp_path)
    shares: list[float] = []
    engine = Engine(target_of("llama"), None, "none", policy="acceptance", progress=shares.append)
    assert shares == []
    jacobi = engine.with_drafter("jacobi")
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert jacobi.costs.machine == describe(target_of("llama"))
    count = len(shares)
    engine.with_drafter("lookahead")  # from the file that was kept
    assert len(shares) == count


def test_unknown_choices_are_named() -> None:
    with pytest.raises(ConfigError, match=r"policy='cots' is unknown; choose acceptance, off, or a cost file"):
        Engine(target_of("llama"), policy="cots")
    assert check_policy("off") == "off"
