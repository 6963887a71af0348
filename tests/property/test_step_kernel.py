"""The Triton kernel of recorded steps under Triton's interpreter: trees, windows, rings and buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings

from specdec.step.block import Block
from specdec.step.cache import KVCache, LayerSpec
from tests.property.test_attention import GROUPS, HEADS, MOST, WIDTH, Case, World, cases
from tests.tiers import each_once

pytest.importorskip("triton", reason="Triton is not installed")
step = pytest.importorskip("specdec.runners.kernels.step")


def attended(world: World) -> torch.Tensor:
    """[1, HEADS, T, WIDTH] of a world's tree in one piece, or in two."""
    case = world.case
    spec = LayerSpec(GROUPS, WIDTH, WIDTH, case.window, torch.device("cpu"), world.keys.dtype)
    cache = KVCache([spec], capacity=case.length + 1, rows=max(MOST, len(case.parents)))
    for store in (*cache.keys, *cache.values):
        store.fill_(torch.nan)
    for start in range(0, case.length, 5):
        rows = min(5, case.length - start)
        cache.write(0, *world.rows(start, start + rows), start)
        cache.commit(range(rows))
    outputs, cuts = [], sorted({0, case.first, len(case.parents)})
    for first, last in pairwise(cuts):
        shape = {} if world.draft.is_chain else {"parents": case.parents[:last], "depths": world.draft.depths[:last]}
        block = Block(cache, [0] * (last - first), first=first, **shape)
        block.store(*world.rows(case.length + first, case.length + last), 0)
        where = block.where()
        padded = world.query.new_full((1, HEADS, len(where["closure"]), WIDTH), torch.nan)
        padded[:, :, : last - first] = world.query[:, :, first:last]
        query = padded.transpose(1, 2).contiguous().transpose(1, 2)  # as it comes, row by row
        output = step.step_attention(query, where, 0, GROUPS, case.window, WIDTH**-0.5)
        assert not output[last - first :].any()
        outputs.append(output[: last - first].view(-1, HEADS, WIDTH).transpose(0, 1)[None])
    return torch.cat(outputs, 2)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of few processors: in 32 parts of a short list of keys all but one would be empty."""
    monkeypatch.setattr(step, "_PROGRAMS", 16)


@pytest.mark.usefixtures("few")
@given(case=cases())
@settings(max_examples=8)
def test_rows_see_their_ancestors_and_the_window(case: Case) -> None:
    world = World(Case(**{**vars(case), "softcap": None}))
    assert (attended(world).double() - world.naive()).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("size", "precision"),
    each_once([(21, 45), (700, 3), (0, 45)], [(torch.float32, 1e-6), (torch.float16, 4e-3)]),
)
def test_more_rows_and_keys_than_one_program_takes(size: tuple[int, int], precision: tuple[torch.dtype, float]) -> None:
    """Several programs beside each other over rows, over heads and over keys; half precision stays near."""
    (length, rows), (dtype, bound) = size, precision
    parents = [-1, *(max(0, row - 3) for row in range(1, rows))]
    world = World(Case(length=length, parents=parents, first=0, window=None, softcap=None, seed=0), dtype)
    got = attended(world)
    assert got.dtype == dtype
    assert (got.double() - world.naive()).abs().max() < bound


def test_keys_are_cut_into_few_parts_where_rows_are_many() -> None:
    parts = [step.constants(1, rows, 8, 4, 128, 2, windowed=False)["PARTS"] for rows in (1, 4, 16, 64, 128)]
    assert parts == [32, 32, 32, 8, 4]
