"""Rows in torch: positions, slots, masks and layouts, by hand; tests/property/test_attention.py attends over them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec import Draft
from specdec.runners.rows import Rows, TextRows
from specdec.runners.visibility import Layout
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.joining import beginning, joined
from specdec.step.step_io import ALL
from tests import seam
from tests.property.trees import parent_lists

#   0 -- 1 -- 3
#    \-- 2 -- 4
TREE = Draft([9, 8, 7, 6, 5], [-1, 0, 0, 1, 2])
ROWS = 5


def text_of(length: int, window: int | None = None) -> seam.Text:
    """``length`` committed tokens, each slot's key the position that it holds."""
    spec = LayerSpec(1, 1, 1, window, torch.device("cpu"), torch.float64)
    cache = KVCache([spec], capacity=100, rows=ROWS)
    for position in range(length):
        mark = torch.full((1, 1, 1, 1), float(position), dtype=torch.float64)
        cache.write(0, mark, mark, position)
        cache.commit([0])
    return seam.Text(cache)


def seen_by(rows: TextRows) -> list[list[int]]:
    """Per row the positions that it sees; the tree's row i counts as position ``length + i``."""
    marks = torch.arange(rows.length + rows.first, rows.length + rows.last, dtype=torch.float64)
    rows.store(marks[None, None, :, None], marks[None, None, :, None], 0)
    keys, _, mask = rows.visible(0, torch.float64)
    positions = keys[0, 0, :, 0].long().tolist()
    if mask is None:
        return [sorted(positions)] * rows.rows
    return [sorted(p for p, m in zip(positions, row, strict=True) if m == 0) for row in mask.tolist()]


def layout_of(rows: TextRows) -> Layout:
    return rows.layout(rows.cache.groups[0], torch.float32)


def test_position_is_length_plus_depth() -> None:
    rows = text_of(10).part(TREE)
    assert rows.positions.tolist() == [[10, 11, 11, 12, 12]]
    assert rows.tokens.tolist() == [[9, 8, 7, 6, 5]]
    assert text_of(4).part([1, 2, 3]).positions.tolist() == [[4, 5, 6]]


def test_tree_sees_the_text_its_ancestors_and_itself() -> None:
    text = [0, 1, 2]
    assert seen_by(text_of(3).part(TREE)) == [
        [*text, 3],
        [*text, 3, 4],
        [*text, 3, 5],
        [*text, 3, 4, 6],
        [*text, 3, 5, 7],
    ]


def test_the_second_piece_of_a_tree_sees_the_first() -> None:
    own = text_of(3)
    assert seen_by(own.part(TREE.tokens[:3], TREE.parents[:3])) == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]
    second = own.part(TREE.tokens[3:], TREE.parents, first=3)
    assert second.positions.tolist() == [[5, 5]]
    assert seen_by(second) == [[0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 5, 7]]


def test_a_window_counts_depth_and_not_rows() -> None:
    """Window 4 at length 10: the root, at position 10, sees 7, 8, 9; rows of depth 2, at 12, see 9 and their path."""
    assert seen_by(text_of(10, window=4).part(TREE)) == [
        [7, 8, 9, 10],
        [8, 9, 10, 11],
        [8, 9, 10, 12],
        [9, 10, 11, 13],
        [9, 10, 12, 14],
    ]


def test_a_window_smaller_than_the_tree_hides_its_root() -> None:
    assert seen_by(text_of(10, window=2).part(TREE)) == [
        [9, 10],
        [10, 11],
        [10, 12],
        [11, 13],
        [12, 14],
    ]


def test_a_lone_row_needs_no_mask() -> None:
    rows = text_of(3).part([1])
    assert rows.mask(rows.cache.groups[0], torch.float32) == ((0, 4), None)


def test_layout_of_a_chain_is_prefix_and_causal_tail() -> None:
    layout = layout_of(text_of(6).part([1, 2, 3]))
    assert (layout.prefix, layout.tail, layout.mask, layout.causal) == (((0, 6),), (6, 9), None, True)


def test_layout_of_a_tree_masks_the_tree_alone() -> None:
    layout = layout_of(text_of(6).part(TREE))
    assert (layout.prefix, layout.tail, layout.causal) == (((0, 6),), (6, 11), False)
    assert layout.mask is not None
    assert (layout.mask == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


def test_layout_on_a_ring() -> None:
    """Window 4, rows 5: a ring of 8. At length 10 all see position 9; 7 and 8 are the window's edge, then the tree."""
    rows = text_of(10, window=4).part(TREE)
    assert rows.cache.groups[0].size == 8
    layout = layout_of(rows)
    assert layout.prefix == ((1, 2),)
    assert isinstance(layout.tail, torch.Tensor)
    assert layout.tail.tolist() == [7, 0, 2, 3, 4, 5, 6]
    assert layout.mask is not None
    assert (layout.mask == 0).int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 1, 0, 0],
        [0, 0, 1, 1, 0, 1, 0],
        [0, 0, 1, 0, 1, 0, 1],
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@given(parents=parent_lists(ROWS), length=st.integers(0, 30), data=st.data())
def test_mask_and_layout_agree_with_a_list(
    window: int | None, parents: list[int], length: int, data: st.DataObject
) -> None:
    """Every row's positions, one by one, for the mask and for the layout, also for the tree's second piece."""
    draft = Draft([0] * len(parents), parents)
    first = data.draw(st.integers(0, len(parents) - 1))
    own = text_of(length, window)
    if first:
        seen_by(own.part(draft.tokens[:first], parents[:first]))
    rows = own.part(draft.tokens[first:], parents, first=first)
    expected = []
    for row in range(first, len(parents)):
        position, seen, above = length + draft.depths[row], list[int](), row
        while above >= 0:
            seen += [length + above] * (window is None or draft.depths[row] - draft.depths[above] < window)
            above = parents[above]
        expected.append(sorted([p for p in range(length) if window is None or position - p < window] + seen))
    assert seen_by(rows) == expected

    layout = layout_of(rows)
    holds = rows.cache.groups[0].keys[0, 0, 0, :, 0]
    common = [int(holds[slot]) for start, stop in layout.prefix for slot in range(start, stop)]
    slots = list(range(*layout.tail)) if isinstance(layout.tail, tuple) else layout.tail.tolist()
    for number, row in enumerate(expected):
        open_ = [layout.mask is None or layout.mask[number, place] == 0 for place in range(len(slots))]
        if layout.causal:
            open_ = [place <= number for place in range(len(slots))]
        assert sorted([*common, *(int(holds[s]) for s, o in zip(slots, open_, strict=True) if o)]) == row


def test_where_a_lone_chain_begins_does_not_depend_on_who_was_beside_it() -> None:
    """Also of the first of several sequences, taken again."""
    steps = [text_of(length).rows([1] * rows) for length, rows in ((4, 2), (9, 3))]
    alone, both = Rows(steps[0]), Rows(joined(steps))
    assert (alone.start, both.start, text_of(3).part([1], first=2).positions.tolist()) == (4, None, [[5]])
    assert Rows(beginning(joined(steps), 1, ALL)).start == 4
    assert Rows(text_of(3).rows([1], first=2)).start == 5
    assert Rows(text_of(3).rows(TREE)).start is None
