"""Tree attention on random trees, caches and windows, whole and in parts: a softmax over a list of seen keys."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.runners.attention import attend
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.tree import Draft
from tests import seam
from tests.property.trees import parent_lists

HEADS, GROUPS, WIDTH, VALUE_WIDTH = 4, 2, 8, 8
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

    def __init__(self, case: Case, dtype: torch.dtype = torch.float32) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        total = case.length + len(case.parents)

        def uniform(heads: int, rows: int, width: int) -> torch.Tensor:
            return torch.rand(1, heads, rows, width, generator=generator, dtype=dtype) * 2 - 1

        self.keys, self.values = uniform(GROUPS, total, WIDTH), uniform(GROUPS, total, VALUE_WIDTH)
        self.query = uniform(HEADS, len(case.parents), WIDTH) * 3
        self.draft = Draft([0] * len(case.parents), case.parents)

    def naive(self) -> torch.Tensor:
        """[1, HEADS, T, VALUE_WIDTH] one softmax per row and head, over an explicit list of the keys it sees."""
        case, depths = self.case, self.draft.depths
        output = torch.empty(1, HEADS, len(case.parents), VALUE_WIDTH, dtype=torch.float64)
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
                scores = keys @ self.query[0, head, row].double() * WIDTH**-0.5
                if case.softcap is not None:
                    scores = torch.tanh(scores / case.softcap) * case.softcap
                output[0, head, row] = torch.softmax(scores, 0) @ self.values[0, head * GROUPS // HEADS, seen].double()
        return output

    def attended(self, backend: str = "auto", *, pieces: bool = False) -> torch.Tensor:
        """The same by specdec: the text committed in chunks, then the tree in one piece or two."""
        case = self.case
        spec = LayerSpec(GROUPS, WIDTH, VALUE_WIDTH, case.window, torch.device("cpu"), self.keys.dtype)
        cache = KVCache([spec], capacity=case.length + 1, rows=max(MOST, len(case.parents)))
        for array in (*cache.keys, *cache.values):
            array.fill_(torch.nan)  # a slot that is read before it was written shows
        for start in range(0, case.length, 5):
            rows = min(5, case.length - start)
            cache.write(0, *self.rows(start, start + rows), start)
            cache.commit(range(rows))
        cuts = [0, case.first, len(case.parents)] if pieces and case.first else [0, len(case.parents)]
        outputs = []
        for first, last in pairwise(cuts):
            parents = None if self.draft.is_chain else case.parents[:last]
            part = seam.Text(cache).part([0] * (last - first), parents, first=first, backend=backend)
            part.store(*self.rows(case.length + first, case.length + last), 0)
            query = self.query[:, :, first:last]
            outputs.append(attend(query, part, 0, WIDTH**-0.5, case.softcap))
        return torch.cat(outputs, 2)

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
