"""A batch's arrays for kernels: those of its blocks one by one, stacked and padded, in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specdec import Draft
from specdec.step import batched_rows, device_copies
from specdec.step.batched_rows import Batch
from specdec.step.block import Block
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.visibility import bucket

CPU = torch.device("cpu")
TREE = (-1, 0, 0, 1, 1)


def blocks_of(trees: Sequence[Sequence[int]], *, again: bool = True, late: Sequence[int] = ()) -> list[Block]:
    """A block of each tree, after texts of different lengths; tokens of those in ``late`` are the device's."""
    blocks = []
    for number, parents in enumerate(trees):
        cache = KVCache([LayerSpec(1, 4, 4, None, CPU, torch.float32)] * 2, capacity=60, rows=16)
        cache.length = 3 * number
        draft = Draft([10 * number + row for row in range(len(parents))], parents)
        more = {"own": np.arange(number + 1)} if number % 2 else None
        blocks.append(Block.of(draft, cache, CPU, more=more))
        blocks[-1].again = again
        if number in late:
            blocks[-1].ids = device_copies.Later(torch.tensor(draft.tokens))
    return blocks


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)


@pytest.mark.parametrize("late", [(), (0,), (0, 1)])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(
    "trees", [[(-1,)] * 3, [(-1,), (-1, 0, 1)] * 2, [range(-1, 4)] * 5, [(-1,), TREE, (-1, 0)], [TREE] * 2]
)
def test_a_block_of_a_batch_has_what_it_has_alone(
    trees: Sequence[Sequence[int]], again: bool, late: Sequence[int]
) -> None:
    alone, together = (blocks_of(trees, again=again, late=late) for _ in range(2))
    batch = Batch(together)
    batch.send()
    first = 0
    for one, other in zip(alone, together, strict=True):
        for name in one.arrays:
            assert torch.equal(other.sent[name], one.sent[name]), name
        rows = slice(first, first + one.rows)
        assert torch.equal(batch.tokens[0, rows], one.tokens[0])
        assert torch.equal(batch.positions[0, rows], one.positions[0])
        first += one.rows
        assert other.step.keys() == one.step.keys()
        for name, array in one.step.items():
            same = other.step[name][tuple(map(slice, array.shape))]
            where = torch.ones_like(same, dtype=torch.bool)
            if name == "table":  # where each cache is
                where[..., :2] = False
            assert torch.equal(same[where], array[where]), name
            assert not other.step[name].sum() - same.sum(), "the rest is padding"


@pytest.mark.parametrize(
    "trees", [[(-1,)] * 3, [(-1,), (-1, 0, 1), (-1,), (-1, 0, 1, 2)], [(-1,), TREE, (-1, 0), (-1, 0, 0, 0, 0, 0)]]
)
def test_groups_have_every_row_once_with_what_its_block_has(trees: Sequence[Sequence[int]]) -> None:
    alone, together = blocks_of(trees, again=False), blocks_of(trees, again=False)
    groups, order = Batch(together).groups()
    rows = torch.cat([group.rows for group in groups])
    assert torch.equal(rows[order], torch.arange(sum(map(len, trees))))
    found, first = dict[int, tuple[dict[str, torch.Tensor], int]](), 0
    for group in groups:
        for number, each in enumerate(group.rows.view(len(group.arrays["counts"]), -1).tolist()):
            found[each[0]] = {name: array[number] for name, array in group.where().items()}, len(each)
    assert len({(one.parents is None, bucket(one.rows)) for one in alone}) == len(groups)
    for one, other in zip(alone, together, strict=True):
        arrays, places = found[first]
        first += one.rows
        assert places >= one.rows
        assert arrays["counts"].tolist() == [one.length, 0, one.rows]
        assert np.array_equal(arrays["table"], other.cache.table)
        assert torch.equal(arrays["places"][: one.rows], one.positions[0])
        assert ("closure" in arrays) == (one.parents is not None)
        if one.parents is not None:
            closure = one.step["closure"]
            assert torch.equal(arrays["closure"][tuple(map(slice, closure.shape))], closure)


def test_chains_are_stacked_as_trees_are() -> None:
    blocks = blocks_of([(-1,), (-1, 0, 1), (-1, 0)])
    found = batched_rows._chains(blocks, Batch(blocks)._padding)
    for name, array in blocks[0].shapes.items():
        expected = batched_rows._stacked([block.shapes[name] for block in blocks])
        assert found[name].dtype == expected.dtype == array.dtype
        assert np.array_equal(found[name][:3], expected[:3]), name


def test_nothing_is_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    copy_in = device_copies.copy_in
    monkeypatch.setattr(
        device_copies, "copy_in", lambda arrays, device: (sizes.append(len(arrays)), copy_in(arrays, device))[1]
    )
    blocks = blocks_of([(-1,)] * 4)
    batch = Batch(blocks)
    batch.send()
    batch.send()
    for block in blocks:
        assert block.sent is block.sent
        assert block.step
    assert sizes == [3 + 2], "step, spread, packed, and what two blocks have besides"
