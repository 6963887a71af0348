"""Tree attention on random trees, caches and windows: by torch, whole and in parts, and by the native library.

It is a softmax over a list of seen keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specdec.native.library import library
from specdec.runners.attention import attend, attend_ends
from specdec.runners.rows import Rows
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.tree import Draft
from tests import seam
from tests.property.trees import parent_lists

HEADS, GROUPS, WIDTH = 4, 2, 8
WIDE = 32  # heads that the native library attends with, in pairs of bfloat16 where the processor multiplies these
MOST = 12  # rows of a tree


@dataclass(frozen=True)
class Case:
    """A text of ``length`` committed tokens and a tree below it; ``first``: the tree runs in two pieces, cut there."""

    length: int
    parents: list[int]
    first: int
    window: int | None
    softcap: float | None
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    parents = draw(parent_lists(MOST))
    return Case(
        length=draw(st.integers(0, 40)),
        parents=parents,
        first=draw(st.integers(0, len(parents) - 1)),
        window=draw(st.sampled_from([None, 1, 2, 4, 9])),
        softcap=draw(st.sampled_from([None, 1.5])),
        seed=draw(st.integers(0, 3)),
    )


class World:
    """Keys, values and queries of a case, and the attention of its rows both ways."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        total = case.length + len(case.parents)

        def uniform(heads: int, rows: int, width: int) -> torch.Tensor:
            return torch.rand(1, heads, rows, width, generator=generator, dtype=dtype) * 2 - 1

        self.keys, self.values = uniform(GROUPS, total, width), uniform(GROUPS, total, width)
        self.query, self.width = uniform(HEADS, len(case.parents), width) * 3, width
        self.sinks: torch.Tensor | None = None
        self.draft = Draft([0] * len(case.parents), case.parents)

    def naive(self) -> torch.Tensor:
        """[1, HEADS, T, width] one softmax per row and head, over an explicit list of the keys it sees."""
        case, depths = self.case, self.draft.depths
        output = torch.empty(1, HEADS, len(case.parents), self.width, dtype=torch.float64)
        for row in range(len(case.parents)):
            position = case.length + depths[row]
            seen = [p for p in range(case.length) if case.window is None or position - p < case.window]
            above = row
            while above >= 0:
                if case.window is None or depths[row] - depths[above] < case.window:
                    seen.append(case.length + above)
                above = case.parents[above]
            for head in range(HEADS):
                keys = self.keys[0, head * GROUPS // HEADS, seen].double()
                scores = keys @ self.query[0, head, row].double() * self.width**-0.5
                if case.softcap is not None:
                    scores = torch.tanh(scores / case.softcap) * case.softcap
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks[head : head + 1].double()))
                values = self.values[0, head * GROUPS // HEADS, seen].double()
                output[0, head, row] = torch.softmax(scores, 0)[: len(seen)] @ values
        return output

    def attended(self, backend: str = "auto", *, pieces: bool = False) -> torch.Tensor:
        """The same by specdec: the text committed in chunks, then the tree in one piece or two."""
        case = self.case
        cache = self.cache()
        cuts = [0, case.first, len(case.parents)] if pieces and case.first else [0, len(case.parents)]
        outputs = []
        for first, last in pairwise(cuts):
            parents = None if self.draft.is_chain else case.parents[:last]
            part = seam.Text(cache).part([0] * (last - first), parents, first=first, backend=backend)
            part.store(*self.rows(case.length + first, case.length + last), 0)
            query = self.query[:, :, first:last]
            outputs.append(attend(query, part, 0, self.width**-0.5, case.softcap))
        return torch.cat(outputs, 2)

    def cache(self) -> KVCache:
        """The text, committed in chunks."""
        case = self.case
        spec = LayerSpec(GROUPS, self.width, self.width, case.window, torch.device("cpu"), self.keys.dtype)
        cache = KVCache([spec], capacity=case.length + 1, rows=max(MOST, len(case.parents)))
        for array in (*cache.keys, *cache.values):
            array.fill_(torch.nan)  # a slot that is read before it was written shows
        for start in range(0, case.length, 5):
            rows = min(5, case.length - start)
            cache.write(0, *self.rows(start, start + rows), start)
            cache.commit(range(rows))
        return cache

    def by_library(self, first: int = 0, last: int | None = None, *, ends: int | None = None) -> torch.Tensor:
        """Attention of the tree's rows [first, last) by the library, or of as many of the last of them."""
        case, cache = self.case, self.cache()
        last = len(case.parents) if last is None else last
        cache.write(0, *self.rows(case.length, case.length + first), case.length)
        parents = None if self.draft.is_chain else case.parents[:last]
        rows = Rows(seam.Text(cache).rows([0] * (last - first), parents, first=first))
        rows.store(*self.rows(case.length + first, case.length + last), 0)
        query, scale = self.query[:, :, first:last], self.width**-0.5
        if ends is not None:
            return attend_ends(query, rows, 0, scale, [ends])
        return attend(query, rows, 0, scale, case.softcap, self.sinks)

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:, :, first:last], self.values[:, :, first:last]


@pytest.mark.few(1)
@pytest.mark.parametrize("in_parts", [False, True])
@given(case=cases())
@settings(max_examples=150)
def test_rows_see_their_ancestors_and_the_window(in_parts: bool, case: Case) -> None:
    world = World(case)
    expected = world.naive()
    with seam.in_parts(in_parts):
        whole, pieces = world.attended(), world.attended(pieces=True)
    assert whole.shape == expected.shape
    assert (whole.double() - expected).abs().max() < 1e-6
    assert (pieces.double() - expected).abs().max() < 1e-6


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@given(case=cases(), sinks=st.booleans())
@settings(max_examples=100)
def test_the_library_sees_the_same(dtype: torch.dtype, error: float, case: Case, sinks: bool) -> None:
    """And a row's bits are the same alone, in pieces and beside the others; sinks take their share."""
    world, last = World(case, dtype, WIDE), len(case.parents) - 1
    if sinks:
        world.sinks = torch.tensor([0.5, -4.0, 3.0, -torch.inf])
    whole, expected = world.by_library(), world.naive()
    assert (whole.shape, whole.dtype) == (expected.shape, dtype)
    assert (whole.double() - expected).abs().max() < error
    for first in {case.first, last}:
        assert torch.equal(world.by_library(first), whole[:, :, first:])
    if case.softcap is None and not sinks:
        assert torch.equal(world.by_library(ends=last + 1 - case.first), whole[:, :, case.first :])


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_key_far_above_the_others_has_all_weight(dtype: torch.dtype) -> None:
    """Wherever it lies: exponentials are of scores below the largest of all, or they would overflow."""
    world = World(Case(50, [-1], 0, None, None, 0), dtype, WIDE)
    world.query.fill_(1)
    for place in range(51):
        world.keys.zero_()
        world.keys[:, :, place] = 300 / WIDE**0.5  # a score of 300; the others' are 0
        assert torch.equal(world.by_library()[0, :, 0], world.values[0, :, place].repeat_interleave(HEADS // GROUPS, 0))


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    case=cases(),
    broken=st.lists(st.tuples(st.integers(0, 60), st.sampled_from([math.inf, math.nan])), max_size=3),
    keys=st.booleans(),
)
@example(case=Case(3, [-1, *range(8)], 0, None, None, 0), broken=[(3, math.inf)], keys=False)
@example(case=Case(20, [-1, *range(8)], 0, None, None, 0), broken=[(25, math.nan)], keys=False)
@settings(max_examples=60)
def test_what_is_no_number_reaches_a_row_as_it_does_alone(
    dtype: torch.dtype, case: Case, broken: list[tuple[int, float]], keys: bool
) -> None:
    """Rows that share a block fill it by other keys than a row alone does; 0 times inf is NaN."""
    world, total = World(case, dtype, WIDE), case.length + len(case.parents)
    for place, value in broken:
        (world.keys if keys else world.values)[:, :, place % total, place % WIDE] = value
    whole = world.by_library()
    for row in range(len(case.parents)):
        torch.testing.assert_close(
            world.by_library(row, row + 1), whole[:, :, row : row + 1], rtol=0, atol=0, equal_nan=True
        )


def both(world: World) -> list[torch.Tensor]:
    """Attention that is computed whole, and in parts."""
    found = list[torch.Tensor]()
    for in_parts in (False, True):
        with seam.in_parts(in_parts):
            found.append(world.attended())
    return found


@given(case=cases())
@settings(max_examples=60)
def test_parts_equal_the_whole_in_float64(case: Case) -> None:
    whole, parts = both(World(case, torch.float64))
    assert (whole - parts).abs().max() < 1e-13


def test_large_masks_go_in_parts() -> None:
    """Unasked, where the mask would be large; both ways give the same."""
    case = Case(length=6000, parents=list(range(-1, MOST - 1)), first=0, window=None, softcap=None, seed=0)
    world = World(case)
    whole, parts = both(world)
    unasked = world.attended()
    assert torch.equal(unasked, parts)
    assert not torch.equal(unasked, whole)  # else this shows nothing
    assert (whole - parts).abs().max() < 1e-6
