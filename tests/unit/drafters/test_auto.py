"""Auto: rows are judged by how their like have fared, and only those that pay are verified."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.auto import Auto, AutoConfig
from drafters.heads import session
from drafters.heads.eagle import Eagle
from drafters.union.bandit import Bandit, kind_of
from drafters.union.parts import MergedPart, Tree
from specdec import Draft, Engine, Hints, SamplingParams, TransformersTarget
from specdec.costs.curve import CostCurve, roofline
from specdec.costs.prices import BatchLoad, Prices
from specdec.drafting.registry import make_drafter
from specdec.errors import ConfigError
from specdec.step.step_io import Entering
from specdec.target import FINAL
from tests import seam
from tests.fakes import Oracle
from tests.launching import fused, launch
from tests.models import DRAFTER_OPTIONS, FAMILIES, greedy, new_model, prompt_of, reference, target_of
from tests.unit.costs.test_policy import curve_of
from tests.unit.drafters.test_token_recycling import context_of
from tests.unit.drafters.test_union import Fixed

PROMPT = prompt_of(9)


def engine_of(
    *parts: Any, row: float = 0.001, learns: bool = False, policy: str = "acceptance", **options: object
) -> Engine:
    """An engine whose rows cost ``row`` plain steps each; parts without taps are asked from the first step on."""
    for part in parts:
        part.needs_observe = learns
    auto = Auto(AutoConfig(**options), list(parts))  # type: ignore[arg-type]
    return Engine(target_of("llama"), None, auto, policy=policy, costs=curve_of(row=row))


def oracle(new: int, **options: object) -> Oracle:
    target = target_of("llama")
    return Oracle([*PROMPT, *greedy("llama", PROMPT, new)], target.vocab_size, steady=True, **options)  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if place % 3 else name for place, name in enumerate(FAMILIES)],
)
def test_every_part_at_once_changes_no_token(family: str) -> None:
    """With rows that cost nothing all parts stay awake and all of their rows are verified."""
    target = target_of(family, execution="auto")
    engine = Engine(target, None, "auto", max_rows=40, policy="acceptance", costs=curve_of(row=1e-9))
    for size in (1, 9, 40):
        prompt = prompt_of(size)
        with seam.in_parts():
            out = engine.generate(prompt, 50)
        assert out.token_ids == greedy(family, prompt, 50)
    assert out.stats.rows_per_step > 8
    sampled = SamplingParams(temperature=0.9, seed=5)
    plain = Engine(target).generate(PROMPT, 30, sampled).token_ids
    assert engine.generate(PROMPT, 30, sampled).token_ids == plain


def test_the_right_part_is_found_and_the_wrong_one_sleeps() -> None:
    wrong = Fixed([1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5])
    engine = engine_of(wrong, oracle(120), row=0.1, memory=0.8)
    out = engine.generate(PROMPT, 120)
    assert out.token_ids == greedy("llama", PROMPT, 120)
    assert out.stats.tokens_per_step > 3
    assert len(wrong.rooms) < out.stats.steps
    late = out.stats.rows[-5:-1]
    assert max(late) <= 8, "rows that are always wrong are still verified"


@pytest.mark.parametrize("policy", ["acceptance", "off"])
def test_nothing_is_proposed_where_nothing_pays(policy: str) -> None:
    wrong = Fixed([1, 2, 3], [0, 0, 0])
    out = engine_of(wrong, row=0.5, policy=policy).generate(PROMPT, 100)
    assert out.stats.rows_per_step < 1.5


def test_a_row_that_was_not_verified_is_judged_by_the_text() -> None:
    """Rows are too dear to begin with; that the first one would always have been right shows all the same."""
    engine = engine_of(oracle(60, deepest=1), row=0.4)
    out = engine.generate(PROMPT, 60)
    assert out.stats.rows[0] == 1
    assert set(out.stats.rows[-20:-1]) == {2}


def jump_of(second: float) -> CostCurve:
    """The second row of a step costs this much, in plain steps, and no further one costs anything."""
    return CostCurve(machine={}, rows=[1, 2, 64], lengths=[100], seconds=[[1.0, 1.0 + second, 1.0 + second]])


def test_rows_that_are_cheap_but_for_the_first_are_weighed_together() -> None:
    wrong = Fixed([1, 2, 3], [0, 0, 0])
    engine = Engine(target_of("llama"), None, Auto(AutoConfig(), [wrong]), policy="acceptance", costs=jump_of(0.9))
    assert set(engine.generate(PROMPT, 30).stats.rows) == {1}


def test_rows_that_held_less_than_they_promised_are_trusted_less() -> None:
    part = Fixed([5], [0])
    part.needs_observe = False
    engine = Engine(target_of("llama"), None, Auto(AutoConfig(), [part]), policy="acceptance", costs=jump_of(0.1))
    auto: Any = engine.drafter
    assert engine.generate(PROMPT, 2).stats.rows[0] == 2
    record = auto.record
    assert record.sure < 1
    for _ in range(30):
        record.learn(1.0, 0)
    assert record.sure < 0.1
    assert engine.generate(PROMPT, 2).stats.rows[0] == 1
    for _ in range(60):
        record.learn(1.0, 1)
    assert engine.generate(PROMPT, 2).stats.rows[0] == 2


def chain_of(size: int, match: int = 0) -> Draft:
    return Draft.chain([9, *range(1, size + 1)], hints=Hints(match_length=match))


def reach_of(record: Bandit, draft: Draft, *before: Draft) -> list[float]:
    """The chances of a draft's rows in a tree that holds those ``before`` it."""
    tree, part = Tree(9), MergedPart(Fixed(), record, context_of([9]))
    for part.draft in (*before, draft):
        part.place(tree, 0.0)
    return tree.reach[part.added.start :]


def test_a_drafter_that_knows_its_chances_is_believed() -> None:
    """Along a chain and in a tree."""
    for parents, reach in (([-1, 0, 1, 2], [1, 0.5, 0.1, 0.09]), ([-1, 0, 0, 1], [1, 0.5, 0.2, 0.45])):
        drafter, tree = Fixed(), Tree(7)
        part = MergedPart(drafter, Bandit(drafter, 0.9), context_of([7]))
        part.draft = Draft([7, 1, 2, 3], parents, hints=Hints(chances=[1, 0.5, 0.2, 0.9]))
        part.place(tree, 0.0)
        assert tree.reach == pytest.approx(reach)


@pytest.mark.parametrize("computes", [True, False])
def test_a_part_with_a_model_is_judged_by_many_steps(computes: bool) -> None:
    """It brings 1.8 tokens in every sixteenth step and costs a tenth of one in each: together it pays."""
    part = Fixed(taps=[1] if computes else ())
    bandit, prices = Bandit(part, 0.96), Prices(roofline())
    awake = 0
    for step in range(400):
        if bandit.awake(prices, 10):
            awake += 1
            bandit.judge(prices, 10, tokens=1.8 * (step % 16 == 15), cost=0.1)
    assert (awake == 400) == computes


def test_a_crowd_tries_what_does_not_pay_in_no_more_steps_than_one_alone() -> None:
    """All of them are asked at once then, before the first is judged."""
    asked = dict[int, int]()
    for sequences in (1, 8):
        bandit, prices = Bandit(Fixed(), 0.96), Prices(roofline())
        prices.batch_load = BatchLoad(sequences, sequences - 1)
        steps = 0
        for _ in range(2000):
            trying = [bandit.awake(prices, 10) for _ in range(sequences)]
            steps += any(trying)
            for _ in filter(None, trying):
                bandit.judge(prices, 10, tokens=0.0, cost=0.1)
        asked[sequences] = steps
    assert asked[8] <= asked[1] < 400


def test_chances_by_depth_rank_and_match() -> None:
    record = Bandit(Fixed(), 0.9)
    first, second, _, last = reach_of(record, Draft([9, 1, 2, 3, 4], [-1, 0, 0, 0, 0]))
    assert last < second < first
    (dissenting,) = reach_of(record, chain_of(1), Draft([9, 5], [-1, 0]))
    (sure,) = reach_of(record, chain_of(1, match=8))
    assert dissenting < first < sure
    for _ in range(40):
        record.note(kind_of(2, 1, 0, False), True)
        record.note(kind_of(0, 1, 0, False), False)
    right, onward = reach_of(record, chain_of(2, match=2))
    assert right > 0.85
    assert onward == right * right  # not seen: as the row above it
    assert reach_of(record, chain_of(1))[0] < 0.15


def test_rows_that_cannot_pay_are_left_out_before_they_are_merged() -> None:
    """What is taken then is what would have been taken of all rows, with steps of any shape; and little is merged."""
    chooser, merged = random.Random(5), [0, 0]
    for _ in range(200):
        rows = (1, 2, 4, 8, 16, 32)
        each = [chooser.choice([0.1, 0.2, 0.4]) * (after - before) for before, after in pairwise(rows)]
        curve = CostCurve(machine={}, rows=rows, lengths=(8,), seconds=[[*accumulate(each, initial=1.0)]])
        prices, drafters, taken = Prices(curve), [Fixed(), Fixed()], list[set[tuple[int, ...]]]()
        bandits = [Bandit(drafter, 0.9) for drafter in drafters]
        for bandit, depth in product(bandits, range(1, 9)):
            for _ in range(chooser.randrange(20)):
                bandit.note(kind_of(3, depth, 0, False), chooser.random() < 0.6)
        drafts = [
            chain_of(8, match=7),
            Draft([9, 1, 2, 3, 4], [-1, 0, 0, 1, 1], hints=Hints(chances=[1, 0.6, 0.2, 0.5, 0.1])),
        ]
        for number, least in enumerate((0.0, prices.least(0, 17))):
            tree = Tree(9)
            for bandit, drafter, draft in zip(bandits, drafters, drafts, strict=True):
                part = MergedPart(drafter, bandit, context_of([9]))
                part.draft = draft
                part.place(tree, least)
            merged[number] += len(tree.tokens)
            best = tree.best(16)
            best = best[: prices.keep([tree.reach[row] for row in best], 0)]
            whole = Draft(tree.tokens, tree.parents)
            taken.append({tuple(whole.path_tokens(row)) for row in best})
        assert taken[0] == taken[1]
    assert merged[1] < 0.8 * merged[0]


def test_a_part_whose_drafting_costs_more_than_is_hoped_for_sleeps_from_the_start_on() -> None:
    drafter, prices = Fixed(), Prices(curve_of(row=0.001))
    awake = dict[float, list[bool]]()
    for rows in (0, 0.05, 0.07):  # of a plain step; 0.05 tokens are hoped for, and 0.01 may be lost
        drafter.fixed_cost_rows = round(rows * prices.plain(0) / 1e-4)
        bandit = Bandit(drafter, 0.9)
        awake[rows] = [bandit.awake(prices, 0) for _ in range(4)]
    assert awake == {0: [True] * 4, 0.05: [True] * 4, 0.07: [False, False, False, True]}


def test_kinds_are_told_apart() -> None:
    kinds = [kind_of(*row) for row in product(range(7), range(1, 9), range(4), (False, True))]
    assert len({*kinds, *(kind_of(match, 0, 0, False) for match in range(7))}) == len(kinds) + 7
    Bandit(Fixed(), 0.9).note(max(kinds), True)


def test_equal_rows_are_one_and_go_to_the_first() -> None:
    first, second = Fixed([5, 6], [0, 1]), Fixed([5, 7], [0, 1])
    engine = engine_of(first, second, row=1e-9, learns=True)
    assert engine.generate(PROMPT, 5).stats.rows[0] == 4
    theirs = second.seen[0].draft
    assert theirs is not None
    assert list(theirs.tokens[:3]) == [PROMPT[-1], 5, 7]


def test_rows_to_be_read_are_verified_whatever_they_cost() -> None:
    window = Fixed([3, 4, 5], [0, 1, 1], probes=[1, 2, 3], read=[2])
    assert engine_of(window, row=0.03, learns=True).generate(PROMPT, 3).stats.rows[0] == 3
    seen = window.seen[0]
    assert seen.draft is not None
    assert seen.scores is not None
    assert seen.scores.rows == [0, 2]
    assert 0 <= seen.argmax(2) < target_of("llama").vocab_size


def test_rows_bound_the_tree() -> None:
    engine = engine_of(Fixed([5, 6, 7, 8], [0, 0, 0, 0]), Fixed([9, 10], [0, 0]), row=1e-9, rows=3)
    assert max(engine.generate(PROMPT, 20).stats.rows) == 4


class Early(Fixed):
    def propose(self, row_budget: int) -> Draft:
        return Draft([self.context.root], [-1], entry=Entering(1, torch.zeros(1, 32, dtype=torch.float64)))


def test_a_part_with_a_model_waits_where_rows_are_dear() -> None:
    asked = []
    for row in (0.2, 0.001):
        learner = Fixed([1], [0], taps=[FINAL])
        engine_of(learner, row=row).generate(PROMPT, 20)
        asked.append(len(learner.rooms))
    assert asked[0] == 0
    assert asked[1] > 0


def test_a_part_with_a_model_is_asked_where_a_few_rows_are_cheap() -> None:
    """However dear those are that it might propose as well, which would not be taken."""
    learner = Fixed([1], [0], taps=[FINAL])
    steep = CostCurve(machine={}, rows=[1, 4, 5, 64], lengths=[100], seconds=[[1.0, 1.01, 2.0, 61.0]])
    auto = Auto(AutoConfig(), [learner])
    Engine(target_of("llama"), None, auto, policy="acceptance", costs=steep).generate(PROMPT, 20)
    assert learner.rooms


def test_bad_options() -> None:
    for options, told in (
        ({"parts": []}, "auto.parts is empty"),
        ({"rows": 0}, "auto.rows is 0"),
        ({"memory": 1.0}, "auto.memory is 1.0"),
    ):
        with pytest.raises(ConfigError, match=told):
            AutoConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="auto cannot take 'fixed': its rows enter the target at layer 1"):
        engine_of(Early()).generate(PROMPT, 5)


def test_the_embedded_models_heads_are_found(tiny_engine: Engine) -> None:
    names = [part.name for part in tiny_engine.with_drafter("auto").drafter.parts]  # type: ignore[attr-defined]
    assert names == ["suffix_automaton", "token_recycling", "medusa"]
    other = Engine(target_of("llama"), None, "auto", costs=curve_of(row=0.1))
    names = [part.name for part in other.drafter.parts]  # type: ignore[attr-defined]
    assert names == ["suffix_automaton", "token_recycling"]


@pytest.mark.parametrize("one_call", [True, False])
def test_an_eagle_head_takes_the_place_of_medusa_s(
    one_call: bool, tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package has one whose passes are one call each."""
    folder = DRAFTER_OPTIONS["eagle"](tiny_engine.target, tmp_path)[0]["head"]
    monkeypatch.setattr(session, "weights_folder", lambda *_, **__: Path(folder))
    monkeypatch.setattr(Eagle, "is_one_call", one_call)
    names = [part.name for part in tiny_engine.with_drafter("auto").drafter.parts]  # type: ignore[attr-defined]
    assert names == ["suffix_automaton", "token_recycling", "eagle" if one_call else "medusa"]


@pytest.mark.few(1)
@pytest.mark.parametrize("records", [True, False])
def test_on_a_device_an_eagle_head_is_loaded_where_its_passes_are_recorded(
    records: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch)
    model = new_model("llama", torch.float64)
    target = fused(model) if records else TransformersTarget(model, execution="modules")
    folder = DRAFTER_OPTIONS["eagle"](target, tmp_path)[0]["head"]
    looked = list[str]()

    def found(*_: Any, **__: Any) -> Path:
        looked.append(folder)
        return Path(folder)

    monkeypatch.setattr(session, "weights_folder", found)
    drafter: Any = make_drafter("auto", target)
    assert [part.name for part in drafter.parts] == ["suffix_automaton", "token_recycling", *["eagle"][:records]]
    assert len(looked) == records, "weights that would be dropped are not loaded"
    prompt = prompt_of(9)
    text = Engine(target, None, drafter, max_rows=16, costs=curve_of(row=0.01)).generate(prompt, 20).token_ids
    assert text == reference(model, prompt, 20)
