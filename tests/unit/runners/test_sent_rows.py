"""Rows on a device of its own: of several sequences those of each one, stacked and padded, in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specdec import Draft
from specdec.runners import packed_step
from specdec.runners.sent_rows import SentRows, SentText
from specdec.runners.visibility import bucket
from specdec.step import device_copies
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.joining import joined
from specdec.step.step_io import Draws, StepInput, Walk, Wanted
from tests import seam

CPU = torch.device("cpu")
TREE = (-1, 0, 0, 1, 1)


def steps_of(trees: Sequence[Sequence[int]], *, again: bool = True, late: Sequence[int] = ()) -> list[StepInput]:
    """Rows of each tree, after texts of different lengths; tokens of those in ``late`` are the device's."""
    steps = []
    for number, parents in enumerate(trees):
        cache = KVCache([LayerSpec(1, 4, 4, None, CPU, torch.float32)] * 2, capacity=60, rows=16)
        cache.length = 3 * number
        tokens = [10 * number + row for row in range(len(parents))]
        draws = Draws([7 + number], [0.5 + number]) if number else None
        wanted = Wanted(draws=draws, walks=[Walk(unread=range(number + 1))] if number % 2 else ())
        draft = Draft((), parents, on_device=torch.tensor(tokens)) if number in late else Draft(tokens, parents)
        steps.append(seam.Text(cache).rows(draft, again=again, wanted=wanted))
    return steps


def alone(steps: Sequence[StepInput]) -> list[SentText]:
    return [SentRows(step, CPU).parts[0] for step in steps]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "is_apart", lambda device: True)


@pytest.mark.parametrize("late", [(), (0,), (0, 1)])
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(
    "trees", [[(-1,)] * 3, [(-1,), (-1, 0, 1)] * 2, [range(-1, 4)] * 5, [(-1,), TREE, (-1, 0)], [TREE] * 2]
)
def test_a_sequence_has_among_others_what_it_has_alone(
    trees: Sequence[Sequence[int]], again: bool, late: Sequence[int]
) -> None:
    batch = SentRows(joined(steps_of(trees, again=again, late=late)), CPU)
    first = 0
    for one, other in zip(alone(steps_of(trees, again=again, late=late)), batch.parts, strict=True):
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
def test_groups_have_every_row_once_with_what_its_sequence_has(trees: Sequence[Sequence[int]]) -> None:
    each, batch = alone(steps_of(trees, again=False)), SentRows(joined(steps_of(trees, again=False)), CPU)
    groups, order = batch.groups()
    rows = torch.cat([group.rows for group in groups])
    assert torch.equal(rows[order], torch.arange(sum(map(len, trees))))
    found, first = dict[int, tuple[dict[str, torch.Tensor], int]](), 0
    for group in groups:
        for number, own in enumerate(group.rows.view(len(group.arrays["counts"]), -1).tolist()):
            found[own[0]] = {name: array[number] for name, array in group.where().items()}, len(own)
    assert len({(one.parents is None, bucket(one.rows)) for one in each}) == len(groups)
    for one, other in zip(each, batch.parts, strict=True):
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
    parts = alone(steps_of([(-1,), (-1, 0, 1), (-1, 0)]))
    found = packed_step._chains(parts, packed_step.padding_of((1, 3, 2)))
    for name, array in parts[0].shapes.items():
        expected = packed_step._stacked([part.shapes[name] for part in parts])
        assert found[name].dtype == expected.dtype == array.dtype
        assert np.array_equal(found[name][:3], expected[:3]), name


def test_nothing_is_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    copy_in = device_copies.copy_in
    monkeypatch.setattr(
        device_copies, "copy_in", lambda arrays, device: (sizes.append(len(arrays)), copy_in(arrays, device))[1]
    )
    batch = SentRows(joined(steps_of([(-1,)] * 4)), CPU)
    for part in [*batch.parts, *batch.parts]:
        assert part.sent is part.sent
        assert part.step
    assert sizes == [3 + 2], "step, spread, packed, and what two blocks have besides"
