"""Union: every part sees its own rows and nothing else, rows stay within bounds, and the likeliest come first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.lookahead import Lookahead, LookaheadConfig
from drafters.token_recycling.drafter import TokenRecycling, TokenRecyclingConfig
from drafters.union.bandit import Bandit, kind_of
from drafters.union.drafter import Union, UnionConfig
from drafters.union.parts import MergedPart, Tree, part_of
from specdec import (
    FINAL,
    Context,
    Draft,
    Drafter,
    DrafterBase,
    DraftSession,
    Engine,
    Hints,
    Observation,
    SamplingParams,
)
from specdec.errors import ConfigError
from specdec.step.step_io import Entering
from specdec.step.step_output import StepOutput
from tests.fakes import Oracle, Spy
from tests.models import greedy, prompt_of, target_of
from tests.unit.costs.test_policy import curve_of
from tests.unit.drafters.test_token_recycling import context_of

PROMPT = prompt_of(9)


class Fixed(DrafterBase):
    """Proposes the same rows every time, as many as there is room for, and keeps what it is shown."""

    name = "fixed"

    def __init__(
        self,
        tokens: Sequence[int] = (),
        parents: Sequence[int] = (),
        *,
        probes: Sequence[int] = (),
        read: Sequence[int] = (),
        taps: Sequence[int] = (),
    ) -> None:
        self.tokens, self.parents, self.probes, self.read = tokens, parents, probes, read
        self.taps = frozenset(taps)
        self.rooms: list[int] = []
        self.seen: list[Observation] = []

    def start(self, context: Context) -> DraftSession:
        self.context = context
        return self

    def propose(self, row_budget: int) -> Draft:
        self.rooms.append(row_budget)
        size = min(row_budget, 1 + len(self.tokens))
        return Draft(
            [self.context.root, *self.tokens][:size],
            [-1, *self.parents][:size],
            probes=frozenset(row for row in self.probes if row < size),
            read=[row for row in self.read if row < size],
        )

    def observe(self, seen: Observation) -> None:
        self.seen.append(seen)


def union_of(*parts: Drafter, **options: Any) -> Union:
    """Of these parts; without a policy all of them are asked."""
    return Union(UnionConfig(parts=["any"] * len(parts), **options), parts)


def test_equal_paths_share_rows() -> None:
    first, second = Fixed([3, 4], [0, 1]), Fixed([3, 5, 4, 6], [0, 1, 1, 0])
    session = union_of(first, second, rows=16).start(context_of([1, 2]))
    draft = session.propose(17)
    assert (list(draft.tokens), list(draft.parents)) == ([2, 3, 4, 5, 6], [-1, 0, 1, 1, 0])


def test_a_probe_that_another_part_proposes_is_a_candidate() -> None:
    for parts in ((Fixed([3, 4], [0, 0], probes=[1, 2], read=[1, 2]), Fixed([3], [0])),) * 2:
        for order in (parts, parts[::-1]):
            draft = union_of(*order, rows=8).start(context_of([1, 2])).propose(9)
            assert [draft.tokens[row] for row in draft.probes] == [4]
            assert sorted(draft.tokens[row] for row in draft.read) == [3, 4]


def test_the_likeliest_rows_of_all_parts_come_first() -> None:
    """The first part's second branch is right every time, the second part's chain is, and all else is wrong."""
    first, second = Fixed([3, 4], [0, 0]), Fixed([5, 6, 7], range(3))
    session = union_of(first, second, rows=8).start(context_of([1, 2]))
    for _ in range(8):
        draft = session.propose(100)
        assert (first.rooms[-1], second.rooms[-1]) == (9, 9)
        assert list(draft.tokens) == [2, 3, 4, 5, 6, 7]
        session.observe(Observation(draft, [0, 2], [4, 9], StepOutput(torch.zeros(6, 32))))
        session.observe(Observation(draft, [0, 3, 4, 5], [5, 6, 7, 9], StepOutput(torch.zeros(6, 32))))
        session.observe(Observation(draft, [0, 3, 4, 5], [5, 6, 7, 9], StepOutput(torch.zeros(6, 32))))
    assert set(session.propose(4).tokens) == {2, 5, 6, 7}
    assert set(session.propose(5).tokens) == {2, 4, 5, 6, 7}
    assert list(session.propose(1).tokens) == [2]


def test_room_and_rows_bound_the_tree() -> None:
    first, second = Fixed([3], [0]), Fixed([4, 5, 6, 7, 8, 9, 10, 11, 12], range(9))
    session = union_of(first, second, rows=8).start(context_of([1, 2]))
    assert [len(session.propose(row_budget)) for row_budget in (100, 4, 1)] == [9, 4, 1]
    assert (first.rooms, second.rooms) == ([9, 4], [9, 4]), "with no room nobody is asked"


def test_q_is_dropped_as_equal_rows_are_merged() -> None:
    class Drawn(Fixed):
        def propose(self, row_budget: int) -> Draft:
            return Draft.chain([self.context.root, 3], q={0: torch.full((32,), 1 / 32)})

    assert not union_of(Drawn()).start(context_of([1, 2])).propose(9).q


def test_a_tree_costs_what_its_parts_cost() -> None:
    class Costly(Fixed):
        def propose(self, row_budget: int) -> Draft:
            return Draft([self.context.root, *self.tokens], range(-1, len(self.tokens)), hints=Hints(cost=0.5))

    both = union_of(Costly([3, 4]), Costly()).start(context_of([1, 2])).propose(9)
    assert (list(both.tokens), both.hints.cost) == ([2, 3, 4], 1.0)
    short = union_of(Costly([3, 4]), Fixed(), rows=1).start(context_of([1, 2])).propose(9)
    assert (list(short.tokens), short.hints.cost) == ([2, 3], 0.5)


@st.composite
def parts(draw: st.DrawFn) -> Fixed:
    """A small tree of few tokens, so that parts meet; some rows are probes, and some are read."""
    size, chain = draw(st.integers(0, 5)), draw(st.booleans())
    parents = [above if chain else draw(st.integers(0, above)) for above in range(size)]
    rows = st.sets(st.integers(1, size), max_size=2) if size else st.just(set[int]())
    read = draw(rows)
    probes = {row for row in draw(rows) if row not in parents}
    tokens = draw(st.lists(st.integers(3, 4), min_size=size, max_size=size))
    return Fixed(tokens, parents, probes=probes, read=sorted(read))


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from the root to each row."""
    paths = [(int(draft.tokens[0]),)]
    for row in range(1, len(draft)):
        paths.append((*paths[draft.parents[row]], int(draft.tokens[row])))
    return paths


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(parts(), min_size=2, max_size=3), st.sampled_from([2, 64]))
def test_the_tree_is_what_its_parts_propose(some: list[Fixed], rows: int) -> None:
    """All candidates and all that is read, once each, where there is room; never a row of nobody's."""
    draft = union_of(*some, rows=rows).start(context_of([1, 2])).propose(rows + 1)
    found, candidates, read, all_paths = paths_of(draft), {(2,)}, set[tuple[int, ...]](), {(2,)}
    for part in some:
        own = part.propose(rows + 1)
        paths = paths_of(own)
        all_paths.update(paths)
        candidates.update(path for row, path in enumerate(paths) if row not in own.probes)
        read.update(paths[row] for row in own.read)
    needed = {path[:size] for path in read for size in range(1, len(path) + 1)}
    assert len({*found}) == len(found) <= rows + 1
    assert all_paths.issuperset(found)
    assert {found[row] for row in draft.read} <= read
    if rows > 12:
        assert {*found} == candidates | needed
        assert {found[row] for row in draft.read} == read
        assert {found[row] for row in draft.probes} == needed - candidates, "a hope of anybody's is a candidate"


@pytest.mark.parametrize("faint", [0.0, 0.03, 0.5])
@pytest.mark.parametrize("match", [0, 1, 9])
def test_a_chain_by_itself_is_placed_as_any_tree_is(match: int, faint: float) -> None:
    """The short way for what nothing can meet, against the general one; and what a part after it finds there."""
    first, second = Draft.chain([2, *range(3, 15)], hints=Hints(match_length=match)), Draft([2, 3, 5, 4], [-1, 0, 1, 1])
    for seen in (0, 3, 40):
        found = []
        for general in (False, True):
            bandit, tree = Bandit(Fixed(), 0.9), Tree(2)
            for number in range(seen):
                for depth in range(1, 9):
                    bandit.note(kind_of(match.bit_length(), depth, 0, False), number % (depth + 1) > 0)
            parts = [MergedPart(Fixed(), bandit, context_of([2])) for _ in range(2)]
            for part, part.draft in zip(parts, (first, second), strict=True):
                if general:
                    part._merge(tree, faint, min(part.draft.hints.match_length.bit_length(), 6))
                else:
                    part.place(tree, faint)
            kinds = [part.kinds[1:] for part in parts]
            found.append((tree.tokens, tree.parents, tree.reach, tree.best(99), [part.rows for part in parts], kinds))
        assert found[0] == found[1]


@pytest.mark.slow
@settings(max_examples=200)
@given(parts(), st.lists(st.integers(3, 4), min_size=1, max_size=5), st.sampled_from([0.0, 0.2, 0.4]))
def test_rows_behind_what_was_emitted_are_judged_by_what_came(part: Fixed, text: list[int], least: float) -> None:
    """Those that were placed, and the first of a path that was left out as too faint; each against its definition."""
    part.start(context_of([2]))
    draft, bandit = part.propose(9), Bandit(part, 0.9)
    placed = MergedPart(part, bandit, context_of([2]))
    placed.draft = draft
    placed.place(Tree(2), least)
    noted: list[tuple[int, bool]] = []
    bandit.note = lambda kind, right: noted.append((kind, right))  # type: ignore[method-assign]
    placed.judge(text)
    due = []
    for own in range(1, len(placed.kinds)):
        above, depth = draft.parents[own], draft.depths[own]
        if placed.rows[above] >= 0 and draft.path_tokens(above) == text[: depth - 1] and depth <= len(text):
            due.append((placed.kinds[own], draft.tokens[own] == text[depth - 1]))
    assert noted == due


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["acceptance", "off"])
def test_a_part_whose_rows_do_not_pay_is_tried_now_and_then(policy: str) -> None:
    truth = Oracle([*PROMPT, *greedy("llama", PROMPT, 150)], 32, deepest=1, steady=True)
    wrong = Fixed([1, 1, 1], [0, 0, 0])
    engine = Engine(target_of("llama"), None, union_of(truth, wrong), policy=policy, costs=curve_of(row=0.1))
    out = engine.generate(PROMPT, 150)
    assert out.token_ids == greedy("llama", PROMPT, 150)
    if policy == "off":
        assert len(wrong.rooms) >= out.stats.steps - 1  # the last one may have one token left
    else:
        assert 2 <= len(wrong.rooms) < out.stats.steps / 2
        assert out.stats.rows[40:].count(2) > 30, "rows that are always wrong are still verified"


def test_a_part_sees_its_rows_as_if_it_were_alone() -> None:
    """Lookahead in a union whose other part says nothing does what lookahead does, step by step."""
    config = LookaheadConfig(window=4, ngram=4, guesses=3, verify_window="none")
    alone: list[Draft] = []
    joined: list[Draft] = []
    target = target_of("llama")
    Engine(target, None, Spy(Lookahead(config), alone.append)).generate(PROMPT, 40)
    union = union_of(Fixed(), Spy(Lookahead(config), joined.append), Fixed(), rows=60)
    Engine(target, None, union).generate(PROMPT, 40)
    assert [(list(d.tokens), list(d.parents), d.probes) for d in joined] == [
        (list(d.tokens), list(d.parents), d.probes) for d in alone
    ]


def observed_through(parts: Sequence[Fixed], family: str = "llama", rows: int = 30) -> None:
    Engine(target_of(family), None, union_of(*parts, rows=rows)).generate(PROMPT, 12)


def test_observations_fit_together() -> None:
    """Path, tokens, scores and taps of a part's rows are those of the same prefix, whoever proposed its rows."""
    target = target_of("llama")
    text = [*PROMPT, *greedy("llama", PROMPT, 40)]
    parts = [
        Fixed([5, 6, 7], [0, 0, 1], probes=[2], taps=[1]),
        Fixed([5, 9, 9, 4], [0, 1, 0, 3], probes=[3, 4], read=[4], taps=[FINAL]),
    ]
    oracle = Oracle(text, 32, deepest=4, steady=True)
    Engine(target, None, union_of(*parts, oracle, rows=40)).generate(PROMPT, 20)
    for part in parts:
        steps = [seen for seen in part.seen if seen.draft is not None]
        assert len(part.seen) - len(steps) == 1  # one chunk of the prompt
        assert {len(seen.path) for seen in steps} == {5}
        known = len(PROMPT)
        for seen in steps:
            draft = seen.draft
            assert draft is not None
            assert seen.scores is not None
            assert len(seen.path) == len(seen.tokens)
            assert [draft.tokens[row] for row in seen.path] == text[known - 1 : known + 4]
            assert [draft.parents[row] for row in seen.path] == [-1, *seen.path[:-1]]
            assert not draft.probes.intersection(seen.path)
            assert {layer: hidden.shape[0] for layer, hidden in seen.taps.items()} == dict.fromkeys(
                part.taps, len(draft)
            )
            for row, token in zip(seen.path, seen.tokens, strict=True):
                assert seen.argmax(row) == token
            for row in draft.scored_rows() or range(len(draft)):
                seen.scores.at(row)  # all of them are there
            known += len(seen.tokens)


def test_a_part_that_needs_no_draft_sees_each_step_as_it_was() -> None:
    """All rows, whoever proposed them; only other parts' hidden states are kept from it."""
    parts = [Fixed([3, 4], [0, 0], taps=[1]), Fixed([5], [0], taps=[FINAL])]
    parts[1].needs_draft = False
    session = union_of(*parts, rows=8).start(context_of([1, 2]))
    draft = session.propose(100)
    taps = {1: torch.zeros(4, 32), FINAL: torch.ones(4, 32)}
    session.observe(Observation(draft, [0, 2], [4, 7], scores := StepOutput(torch.zeros(4, 32)), taps))
    (mine,), (whole,) = (part.seen for part in parts)
    assert mine.draft is not None
    assert list(mine.draft.tokens) == [2, 3, 4]
    assert (whole.draft, whole.path, whole.tokens, whole.scores) == (draft, [0, 2], [4, 7], scores)
    assert whole.taps.keys() == {FINAL}
    assert whole.taps[FINAL] is taps[FINAL]


def test_part_of_maps_scores_and_taps() -> None:
    whole = Draft((9, 5, 6, 7, 8), (-1, 0, 1, 1, 3), probes=frozenset({2}))
    logits = torch.arange(4.0)[:, None] + 10  # of rows 0, 1, 3, 4
    hidden = torch.arange(5.0)[:, None]
    seen = Observation(whole, [0, 1, 3, 4], [5, 7, 8, 2], StepOutput(logits, [0, 1, 3, 4]), {1: hidden})
    mine = part_of(seen, Draft((9, 5, 6), (-1, 0, 1), probes=frozenset({2})), [0, 1, 2], [1])
    assert mine.draft is not None
    assert mine.scores is not None
    assert (list(mine.draft.tokens), list(mine.draft.parents)) == ([9, 5, 6, 7, 8], [-1, 0, 1, 1, 3])
    assert (list(mine.path), list(mine.tokens), mine.draft.probes) == ([0, 1, 3, 4], [5, 7, 8, 2], {2})
    assert [float(mine.scores.at(row)) for row in mine.path] == [10, 11, 12, 13]
    assert mine.taps[1][:, 0].tolist() == [0, 1, 2, 3, 4]
    other = part_of(seen, Draft((9, 4, 5), (-1, 0, 0)), [0, 0, 1], ())
    assert list(other.path) == [0, 2, 3, 4]
    assert not other.taps
    probed = part_of(seen, Draft((9, 5), (-1, 0), probes=frozenset({1})), [0, 1], ())  # a candidate of another part
    assert probed.draft is not None
    assert probed.scores is not None
    assert not probed.draft.probes
    assert float(probed.scores.at(1)) == 11


def test_taps_are_those_of_all_parts_and_chunks_go_to_those_who_asked() -> None:
    parts = [Fixed(taps=[1]), Fixed(taps=[FINAL, 1]), Fixed()]
    assert union_of(*parts).taps == {1, FINAL}
    observed_through(parts)
    assert [set(part.seen[0].taps) for part in parts] == [{1}, {1, FINAL}, set()]
    assert [part.seen[0].draft is None for part in parts] == [True, True, False]


def test_a_union_of_unions_is_exact() -> None:
    spec = {"name": "union", "parts": ["jacobi", {"name": "union", "parts": ["prompt_lookup", "lookahead"], "rows": 8}]}
    out = Engine(target_of("mistral"), None, spec).generate(PROMPT, 40)
    assert out.token_ids == greedy("mistral", PROMPT, 40)


def test_a_part_that_enters_at_a_layer_is_refused() -> None:
    class Late(Fixed):
        def propose(self, row_budget: int) -> Draft:
            return Draft([self.context.root], [-1], entry=Entering(2, torch.zeros(1, 32, dtype=torch.float64)))

    with pytest.raises(ConfigError, match="union cannot take 'fixed': its rows enter the target at layer 2"):
        observed_through([Late()])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"parts": []}, "union.parts is empty; name at least one drafter"),
        ({"rows": 0}, "union.rows is 0; it must be at least 1"),
        ({"memory": 1.0}, r"union.memory is 1.0; it must be in \[0, 1\)"),
    ],
)
def test_options_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        UnionConfig(**values)


def test_unknown_parts_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown drafter 'lokahead'; did you mean 'lookahead'"):
        Engine(target_of("llama"), None, {"name": "union", "parts": ["lokahead"]})
    with pytest.raises(ConfigError, match="unknown option of lookahead 'windw'"):
        Engine(target_of("llama"), None, {"name": "union", "parts": [{"name": "lookahead", "windw": 3}]})


def test_a_step_that_it_was_not_asked_for() -> None:
    """As a part of another union that sleeps it sees such steps: its rows of the step before are none of theirs."""
    recycling = TokenRecycling(TokenRecyclingConfig())
    session = union_of(Fixed([3, 4], [0, 0]), recycling, rows=8).start(context_of([1, 2]))
    draft = session.propose(100)
    session.observe(Observation(draft, [0], [9], StepOutput(torch.zeros(len(draft), 32))))
    session.observe(Observation(Draft.chain([9]), [0], [5], StepOutput(torch.zeros(1, 32))))


NESTED: dict[str, Any] = {
    "a guess in both": ["jacobi", {"name": "union", "parts": ["jacobi", "prompt_lookup"]}],
    "probes in the middle": [
        "prompt_lookup",
        {"name": "union", "parts": [{"name": "union", "parts": ["token_recycling", "jacobi"], "rows": 5}, "lookahead"]},
    ],
    "auto inside": ["prompt_lookup", {"name": "auto", "parts": ["token_recycling", "jacobi", "lookahead"]}],
    "all is forgotten": [{"name": "auto", "parts": ["jacobi", "prompt_lookup"], "memory": 0.0}, "jacobi"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["union", "auto"])
@pytest.mark.parametrize("parts", NESTED.values(), ids=NESTED)
def test_unions_within_unions_change_no_token(name: str, parts: list[Any]) -> None:
    """With and without a policy, in a room that leaves rows of the inner ones out and in one that does not."""
    prompts, drawn = (PROMPT, (PROMPT[:3] * 9)[:20]), SamplingParams(temperature=0.7, seed=1)
    for policy, max_rows in (("off", 3), ("acceptance", 16)):
        sizes: Any = {"max_rows": max_rows, "policy": policy, "costs": curve_of(row=0.01)}
        engine = Engine(target_of("llama"), None, {"name": name, "parts": parts, "memory": 0.0}, **sizes)
        for prompt in prompts:
            assert engine.generate(prompt, 24).token_ids == greedy("llama", prompt, 24)
            expected = Engine(target_of("llama")).generate(prompt, 24, drawn)
            assert engine.generate(prompt, 24, drawn).token_ids == expected.token_ids
