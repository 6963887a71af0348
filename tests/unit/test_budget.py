"""Budget: rows are kept while they pay, drafters that lose are left alone, and the text stays the target's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from specdec import Context, Draft, DrafterBase, Engine, Observation, SamplingParams
from specdec.budget import Budget, Credit, Patience, make_budget
from specdec.cost import CostCurve
from specdec.errors import ConfigError
from specdec.registry import drafter_names
from tests.fakes import Oracle
from tests.models import greedy, prompt_of, settings_of, target_of

PROMPT = prompt_of(9)


def budget_of(*, row: float, memory: float = 0.95) -> Budget:
    """A plain step takes a second, and every further row ``row`` seconds."""
    rows = [1, 2, 4, 8, 16, 32, 64]
    times = [1 + row * (count - 1) for count in rows]
    return Budget(CostCurve(machine={}, rows=rows, lengths=[100], seconds=[times]), memory=memory)


def test_rows_are_kept_while_they_pay() -> None:
    budget = budget_of(row=0.25)  # and a token takes a second, so far
    assert budget.rate == pytest.approx(1.0)
    assert budget.keep([0.9, 0.5, 0.26, 0.24, 0.1], 0) == 3
    assert budget.keep([0.2, 0.2], 0) == 0
    assert budget.keep([], 0) == 0


def test_a_dear_row_is_kept_for_those_behind_it() -> None:
    steps = CostCurve(machine={}, rows=[1, 2, 3, 4], lengths=[100], seconds=[[1.0, 1.5, 1.5, 1.5]])
    assert Budget(steps).keep([0.3, 0.3, 0.3], 0) == 3


def test_rows_that_are_there_anyway_are_not_priced() -> None:
    steps = CostCurve(machine={}, rows=[1, 2, 8], lengths=[100], seconds=[[1.0, 1.5, 1.5]])
    assert Budget(steps).keep([0.3], 0) == 0
    assert Budget(steps).keep([0.3], 0, base=4) == 1


def test_the_rate_makes_rows_dearer() -> None:
    budget = budget_of(row=0.25)
    chain = Draft.chain(range(5))
    for _ in range(50):
        budget.learn(chain, range(5), 0, 0.0, 2.0)  # 2.5 tokens a second
    assert budget.rate == pytest.approx(2.5, rel=0.1)
    assert budget.keep([0.9, 0.65, 0.55], 0) == 2


def test_a_slow_step_or_a_slow_machine_changes_little() -> None:
    budget = budget_of(row=0.25)
    plain = Draft.chain([1])
    for _ in range(100):
        budget.learn(plain, [0], 0, 0.0, 2.0)  # all takes twice as long as measured
    assert budget.price(0, 2)[2] == pytest.approx(0.25, rel=0.05)
    budget.learn(plain, [0], 0, 0.0, 1000.0)
    assert budget.rate > 0.4


def test_a_drafter_that_is_always_right_gets_all_its_room() -> None:
    budget = budget_of(row=0.1)
    for _ in range(30):
        room = budget.room(9, 0)
        budget.learn(Draft.chain(range(room)), range(room), 0, 0.0, 1 + 0.1 * (room - 1))
    assert budget.room(9, 0) == 9


def test_a_drafter_that_is_never_right_is_seldom_asked() -> None:
    budget = budget_of(row=0.1)
    rooms = []
    for _ in range(300):
        rooms.append(budget.room(9, 0))
        budget.learn(Draft.chain(range(rooms[-1])), [0], 0, 0.0, 1 + 0.1 * (rooms[-1] - 1))
    assert sum(room > 1 for room in rooms) < 20
    assert sum(room > 1 for room in rooms[100:]) >= 2, "it is never asked again"


def test_a_draft_that_takes_longer_than_it_saves_is_not_made() -> None:
    budget = budget_of(row=0.0)
    rooms = []
    for _ in range(60):
        rooms.append(budget.room(4, 0))
        drafted = rooms[-1] > 1
        budget.learn(Draft.chain(range(rooms[-1])), [0, 1] if drafted else [0], 0, 3.0 * drafted, 1 + 3.0 * drafted)
    assert sum(room > 1 for room in rooms[20:]) < 6


def test_patience_doubles() -> None:
    patience = Patience(2, 16)
    tries = [step for step in range(80) if patience.due()]
    assert [after - before for before, after in pairwise(tries)] == [4, 8, 16, 16, 16, 16]
    patience.paid()
    assert [patience.due(), patience.due()] == [False, True]


def test_no_room_is_no_room() -> None:
    assert budget_of(row=0.0).room(1, 0) == 1
    assert Credit(0.1).room(1, 0) == 1


def spend(credit: Credit, accepted: int, steps: int) -> list[int]:
    """The rooms that a drafter gets which fills them, its first rows being right."""
    rooms = []
    for _ in range(steps):
        rooms.append(credit.room(9, 0))
        path = range(min(1 + accepted, rooms[-1]))
        credit.learn(Draft.chain(range(rooms[-1])), path, 0, 0.0, 0.0)
    return rooms


def test_a_drafter_that_is_never_right_rests_and_is_tried_with_one_row_and_more_and_more_rarely() -> None:
    rooms = spend(Credit(0.1), 0, 80)
    tries = [step for step, room in enumerate(rooms) if room > 1]
    assert rooms[0] == 8  # all that 0.75 pays for
    assert [after - before for before, after in pairwise(tries)] == [1, 2, 4, 8, 16, 32]
    assert {rooms[step] for step in tries[1:]} == {2}


def test_a_drafter_that_is_right_again_gets_its_rows_back() -> None:
    credit = Credit(0.1)
    spend(credit, 0, 40)
    rooms = spend(credit, 4, 60)
    assert rooms[-30:] == [9] * 30
    assert spend(credit, 0, 4) == [9, 9, 9, 3]  # what it has saved up carries it a little way, and no further


def test_effort_is_paid_for_like_rows() -> None:
    assert Credit(0.1, effort=3).room(9, 0) == Credit(0.1).room(9, 0) - 3 == 5
    free, dear = Credit(0.1), Credit(0.1, effort=3)
    for credit in (free, dear):
        credit.learn(Draft.chain(range(4)), range(2), 0, 0.0, 0.0)  # .75 + 1 - .4, and - .7
    assert (free.room(20, 0), dear.room(20, 0)) == (14, 7)


def test_rows_that_cost_next_to_nothing_are_not_withheld() -> None:
    assert set(spend(Credit(0.002), 0, 30)) == {9}


def test_silence_costs_nothing() -> None:
    credit = Credit(0.1)
    for _ in range(50):
        assert credit.room(7, 0) == 7
        credit.learn(Draft.chain([1]), [0], 0, 0.0, 0.0)


@pytest.mark.parametrize("drafter", drafter_names())
def test_credit_changes_no_token_and_needs_no_clock(drafter: str, tmp_path: Path) -> None:
    """Twice the same rows, step by step; ``auto`` alone goes by the clock."""
    target = target_of("llama")
    sampling = SamplingParams(temperature=0.8, acceptance="match", seed=3)
    plain = Engine(target).generate(PROMPT, 40, sampling).token_ids
    for settings in settings_of(drafter, target, tmp_path):
        engine = Engine(target, None, settings, max_rows=24, budget="credit")
        first, second = (engine.with_drafter(settings).generate(PROMPT, 40, sampling) for _ in range(2))
        assert first.token_ids == second.token_ids == plain, settings
        assert drafter == "auto" or first.stats.rows == second.stats.rows


class Eager(DrafterBase):
    """Always proposes as many wrong tokens as it may."""

    name = "eager"
    Config = dict

    def start(self, context: Context) -> EagerSession:
        return EagerSession(context)


class EagerSession:
    def __init__(self, context: Context) -> None:
        self._context = context

    def propose(self, room: int) -> Draft:
        return Draft.chain([self._context.root] * min(room, 20))

    def observe(self, seen: Observation) -> None:
        pass


def test_the_engine_leaves_a_losing_drafter_alone_and_lets_a_winning_one_be() -> None:
    target = target_of("llama")
    truth = greedy("llama", PROMPT, 60)
    lost = Engine(target, None, Eager(), budget=budget_of(row=0.5)).generate(PROMPT, 60)
    assert lost.token_ids == truth
    assert lost.stats.rows_per_step < 4
    free = Engine(target, None, Eager()).generate(PROMPT, 60)
    assert free.stats.rows_per_step > 15
    oracle = Oracle([*PROMPT, *truth], target.vocab_size, steady=True)
    won = Engine(target, None, oracle, budget=budget_of(row=0.001)).generate(PROMPT, 60)
    assert won.token_ids == truth
    assert won.stats.tokens_per_step > 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", drafter_names())
def test_no_token_changes_under_a_budget(drafter: str, temperature: float, tmp_path: Path) -> None:
    target = target_of("llama")
    sampling = SamplingParams(temperature=temperature, acceptance="match" if temperature else "auto", seed=3)
    plain = Engine(target).generate(PROMPT, 40, sampling).token_ids
    for settings in settings_of(drafter, target, tmp_path):
        for row in (0.001, 0.2):  # rows are nearly free, or dear
            engine = Engine(target, None, settings, max_rows=24, budget=budget_of(row=row))
            assert engine.generate(PROMPT, 40, sampling).token_ids == plain, settings


def test_choices() -> None:
    target = target_of("llama")
    assert make_budget("off", target) is None
    assert Engine(target, None, "none").budget is None
    assert Engine(target, None, "auto").budget is not None
    engine = Engine(target, None, "jacobi", budget="auto")
    assert engine.budget is engine.budget
    assert engine.with_drafter("none", budget="off").budget is None
    assert engine.with_drafter("none").budget is not None
    given = budget_of(row=0.5)
    other = Engine(target, None, "jacobi", budget=given).with_drafter("lookahead").budget
    assert other is not None
    assert other is not given, "what one drafter was worth says nothing of another"
    assert other.curve is given.curve
    with pytest.raises(ConfigError, match=r"budget='atuo' is unknown; choose credit, auto, off, or a cost file"):
        Engine(target, budget="atuo")
