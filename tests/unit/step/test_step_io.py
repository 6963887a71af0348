"""StepInput: what is said of a forward, of one sequence and of several."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import Draft
from specdec.step.cache import KVCache
from specdec.step.joining import beginning, joined
from specdec.step.step_io import ALL, NOTHING, Draws, Entering, LayerPlan, Part, StepInput, Walk, Wanted
from tests.property.trees import parent_lists

TREE = Draft([9, 8, 7, 6, 5], [-1, 0, 0, 1, 2])


def text(length: int) -> KVCache:
    cache = KVCache([], capacity=100, rows=16)
    cache.length = length
    return cache


def test_a_chain_and_the_rows_behind_its_first() -> None:
    step = StepInput.of(text(7), [3, 4, 5])
    assert (step.starts, step.tree, step.chain, step.rows, step.end) == ((0, 3), (0, 3), (True,), 3, 10)
    assert (step.tokens.tolist(), step.lengths) == ([3, 4, 5], (7,))  # type: ignore[union-attr]
    assert (step.parents.tolist(), step.depths.tolist()) == ([-1, 0, 1], [0, 1, 2])
    later = StepInput.of(text(7), [3], first=4)
    assert (later.starts, later.tree, later.end) == ((0, 1), (0, 5), 12)


def test_the_rows_of_a_tree_end_at_the_deepest_that_runs() -> None:
    step = StepInput.of(text(7), TREE.tokens, TREE.tree)
    assert (step.chain, step.end, step.parents.tolist(), step.depths.tolist()) == (
        (False,), 10, [-1, 0, 0, 1, 2], [0, 1, 1, 2, 2]
    )  # fmt: skip
    first = StepInput.of(text(7), TREE.tokens[:3], TREE.tree)  # of a tree that goes on
    assert (first.tree, first.end, first.parents.tolist()) == ((0, 3), 9, [-1, 0, 0])


def test_a_text_makes_room_for_its_rows_and_no_more() -> None:
    cache = text(7)
    StepInput.of(cache, [3, 4], first=2)
    assert cache.written == 11


@given(trees=st.lists(parent_lists(6), min_size=2, max_size=4))
def test_several_sequences_are_each_one_s_rows_in_order(trees: list[list[int]]) -> None:
    drafts = [Draft([10 * at + row for row in range(len(parents))], parents) for at, parents in enumerate(trees)]
    steps = [StepInput.of(text(3 * at), draft.tokens, draft.tree) for at, draft in enumerate(drafts)]
    step = joined(steps)
    assert step.ids.tolist() == [token for draft in drafts for token in draft.tokens]
    assert step.counts == [len(draft) for draft in drafts]
    assert step.end == max(one.end for one in steps)
    for at, draft in enumerate(drafts):
        own = slice(step.tree[at], step.tree[at + 1])
        assert step.parents[own].tolist() == [*draft.parents]
        assert step.depths[own].tolist() == draft.depths
        assert step.chain[at] == draft.is_chain
    some = beginning(step, 1, NOTHING)
    assert some.end >= steps[0].end
    assert (some.rows, some.ids.tolist(), len(some.texts), some.wanted) == (
        len(drafts[0]),
        drafts[0].tokens,
        1,
        NOTHING,
    )
    assert some.parents.tolist() == [*drafts[0].parents]


def test_what_is_wanted_of_several_is_what_each_wants() -> None:
    draws = Draws((7,), (0.5,))
    each = [
        Wanted(np.array([1]), 3, (2,)),
        Wanted(hidden=(1,), draws=draws, walks=(Walk(np.array([True, False]), True),)),
        Wanted(NOTHING.logits, 0, walks=(Walk(np.array([True, True]), unread=[8, 9]),)),
    ]
    steps = [StepInput.of(text(at), [4] * 2, wanted=wanted) for at, wanted in enumerate(each)]
    found = joined(steps).wanted
    assert (found.scored, found.top_k, found.hidden, found.nothing) == ([1, 2, 3], 3, {1, 2}, False)
    assert found.draws is not None
    assert (found.draws.start, found.draws.temperature) == ([0, 7, 0], [0, 0.5, 0])
    assert found.walks[0].accept is None
    assert [[*walk.accept] for walk in found.walks[1:] if walk.accept is not None] == [[True, False], [True, True]]
    assert [walk.decides for walk in found.walks] == [False, True, False]
    assert [walk.unread for walk in found.walks] == [None, None, [8, 9]]
    assert [one.decides for one in (found, each[1], each[2])] == [True, True, False]
    assert joined(steps[2:]).wanted is each[2]
    assert joined([StepInput.of(text(at), [4], wanted=NOTHING) for at in range(2)]).wanted.nothing
    assert joined([StepInput.of(text(at), [4]) for at in range(2)]).wanted.logits is ALL.logits


def test_tokens_that_a_device_drafted_are_read_when_they_are_asked_for() -> None:
    steps = [StepInput.of(text(0), [3, 4]), StepInput.of(text(0), torch.tensor([5]))]
    assert [step.late for step in steps] == [False, True]
    both = joined(steps)
    assert both.late
    assert both.ids.tolist() == [3, 4, 5]
    assert steps[1].ids.tolist() == [5]
    assert beginning(both, 1, ALL).ids.tolist() == [3, 4]


def test_sequences_that_enter_are_told_from_those_that_begin_with_tokens() -> None:
    hidden = torch.zeros(1, 4)
    steps = [StepInput.of(text(0), [3]), StepInput.of(text(0), [5], entering=Entering(2, hidden))]
    entering = joined(steps).entering
    assert entering is not None
    assert (entering.layer, len(entering.hidden)) == ([-1, 2], 1)
    assert joined(steps[:1] * 2).entering is None


@pytest.mark.parametrize(
    ("parts", "runs"),
    [
        ((), [(Part.BOTH, 1, 4)]),
        ((3, 3, 0, 3), [(Part.BOTH, 1, 2), (Part.BOTH, 3, 4)]),
        ((0, 1, 1, 2), [(Part.ATTENTION, 1, 3), (Part.MLP, 3, 4)]),
        ((3, 0, 0, 0), []),
    ],
)
def test_runs_are_of_the_same_parts_of_consecutive_layers(
    parts: tuple[int, ...], runs: list[tuple[Part, int, int]]
) -> None:
    assert LayerPlan(parts=tuple(map(Part, parts))).runs(1, 4) == runs


def test_shapes_that_come_again_are_made_once() -> None:
    """Nothing of a step of a known shape is made but its tokens and its lengths."""
    one, other = (StepInput.of(text(length), [length]) for length in (3, 8))
    assert one.parents is other.parents
    assert one.depths is other.depths
    assert one.starts is other.starts
    first, second = (joined([StepInput.of(text(at), [at]) for at in range(4)]) for _ in range(2))
    assert first.parents is second.parents
    assert first.tree is second.tree
    with pytest.raises(ValueError, match="read-only"):
        one.parents[0] = 1


def test_no_torch_is_needed() -> None:
    code = "import sys; import specdec.step.step_io; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
