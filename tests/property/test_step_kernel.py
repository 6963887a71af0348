"""The Triton kernel of recorded steps under Triton's interpreter: trees, windows, rings and buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings

from specdec.block import Block
from specdec.cache import KVCache, LayerSpec
from specdec.draft import Draft
from tests.property.test_attention import GROUPS, HEADS, MOST, WIDTH, Case, World, cases
from tests.tiers import each_once

pytest.importorskip("triton", reason="Triton is not installed")
step = pytest.importorskip("specdec.kernels.step")

TREE = [-1, 0, 0, 1, 2, 4, 3, 5, 7, 8, 9]


def test_a_drafted_row_is_the_same_token_decoded_plainly() -> None:
    """Bit for bit: each path of a tree across the borders of keys and of segments, token by token; a window as well."""
    generator = torch.Generator().manual_seed(0)
    for length, parents, window in ((60, TREE, None), (122, list(range(-1, 6)), 70)):
        depths = Draft([0] * len(parents), parents).depths
        every = [torch.randn(1, heads, length + len(parents), WIDTH, generator=generator) for heads in (2, 2, 4)]
        keys, values, query = (one.half() for one in every)
        spec = LayerSpec(2, WIDTH, WIDTH, window, torch.device("cpu"), torch.float16)

        def attend(block: Block, rows: list[int]) -> torch.Tensor:
            block.store(keys[:, :, rows], values[:, :, rows], 0)  # noqa: B023
            where = block.where()
            where["paths"] = step.paths(where)
            own = query.new_zeros(1, 4, len(where["closure"]), WIDTH)  # noqa: B023
            own[:, :, : len(rows)] = query[:, :, rows]  # noqa: B023
            return step.step_attention(
                own.transpose(1, 2).contiguous().transpose(1, 2), where, 0, 2, window, 0.3, 2  # noqa: B023
            )  # fmt: skip

        def filled() -> KVCache:
            cache = KVCache([spec], capacity=length + len(parents), rows=16)  # noqa: B023
            for start in range(0, length, 16):  # noqa: B023
                rows = list(range(start, min(start + 16, length)))  # noqa: B023
                cache.write(0, keys[:, :, rows], values[:, :, rows], start)  # noqa: B023
                cache.commit(range(len(rows)))
            return cache

        tree = Block(filled(), [0] * len(parents), parents=parents, depths=depths)
        drafted = attend(tree, [length + row for row in range(len(parents))])
        leaf = max(range(len(parents)), key=depths.__getitem__)
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        cache = filled()
        for row in path:
            assert torch.equal(attend(Block(cache, [0]), [length + row])[0], drafted[row]), (length, row)
            cache.commit([0])


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
        where["paths"] = step.paths(where)
        padded = world.query.new_full((1, HEADS, len(where["closure"]), WIDTH), torch.nan)
        padded[:, :, : last - first] = world.query[:, :, first:last]
        query = padded.transpose(1, 2).contiguous().transpose(1, 2)  # as it comes, row by row
        output = step.step_attention(
            query, where, 0, GROUPS, case.window, WIDTH**-0.5, step.segments_of(case.length + MOST + 64)
        )
        assert not output[last - first :].any()
        outputs.append(output[: last - first].view(-1, HEADS, WIDTH).transpose(0, 1)[None])
    return torch.cat(outputs, 2)


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
