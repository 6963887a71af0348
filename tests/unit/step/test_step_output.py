"""A forward's output: its parts, its numbers on the host, and how long it holds what it has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.errors import NumericalError
from specdec.step import device_copies
from specdec.step.step_output import StepOutput, finite_argmax

ROWS, VOCAB = 7, 11


def logits_of(seed: int = 3) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed))


def parts_of(whole: StepOutput) -> list[StepOutput]:
    """Of three sequences with 4, 3 and 2 rows, of which 4, none and 3 of the last 3 have logits, and no layer 2."""
    layers = ({1}, {1, 2}, ())
    return [
        whole.of(slice(0, 4), range(4), None, layers[0], 0),
        whole.of(slice(4, 7), range(4, 4), None, layers[1], 1),
        whole.of(slice(7, 11), range(4, 7), [0, 2, 3], layers[2], 2),
    ]


def test_a_part_has_its_rows_of_all() -> None:
    logits, out = logits_of(), torch.randn(11, 4)
    whole = StepOutput(logits, out=out, hidden={1: out + 1, 2: out[:4]})
    first, none, last = parts_of(whole)
    assert torch.equal(first.out, out[:4])
    assert torch.equal(none.out, out[4:7])
    assert first.hidden.keys() == none.hidden.keys() == {1}, "layer 2 is not asked for, or has fewer rows"
    assert torch.equal(none.hidden[1], out[4:7] + 1)
    assert not last.hidden
    assert none.logits is None
    assert torch.equal(last.given, logits[4:])
    assert torch.equal(last.at(2), logits[5])
    for part, rows in ((first, [0, 1, 2, 3]), (last, [0, 2, 3]), (last.select([3, 0], [0, 5]), [0, 5])):
        assert [part.argmax(row) for row in rows] == part.given.argmax(-1).tolist()
        assert part.top_k(3) == part.given.topk(3).indices.tolist()
        assert torch.equal(part.argmax_there, part.given.argmax(-1))
    assert torch.equal(last.select([3, 0], None).given, logits[[6, 4]])
    assert torch.equal(last.select([3, 0], [0, 5]).select([5], None).given, logits[[4]])


@pytest.mark.parametrize("picked", [False, True])
def test_one_copy_brings_the_numbers_of_all_parts(picked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of tensors that others ask for with them; then nothing is read from the device again."""
    logits, copies = logits_of(), list[int]()
    copy_out = device_copies.copy_out

    def counted(tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
        copies.append(len(tensors))
        return copy_out(tensors)

    monkeypatch.setattr(device_copies, "copy_out", counted)
    drawn = torch.arange(ROWS)
    columns = (logits.argmax(-1), torch.where(drawn == 5, -1, drawn), drawn + 20, drawn + 30, drawn + 40)
    whole = StepOutput(logits, out=logits, picked=torch.stack(columns, 1) if picked else None)
    first, _, last = parts_of(whole)
    found = last.fetch(torch.tensor([[7, 8]]), torch.tensor([0.5]), top_k=3)
    assert (found, copies) == ([[7, 8], [0.5]], [3 + 2])
    monkeypatch.setattr(torch.Tensor, "tolist", None)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    order = sorted(range(VOCAB), key=lambda token: -float(logits[5, token]))
    assert [last.argmax(2), last.top_k(2)[1]] == [order[0], order[:2]]
    tokens, values = last.weighed(3)
    assert values is not None
    assert [*map(float, logits[5][[*tokens[1]]])] == [*values[1]]
    decided = [[part.decided(row) for row in part.rows or range(4)] for part in (first, last)]
    assert decided == ([[0, 1, 2, 3], [4, None, 6]] if picked else [[None] * 4, [None] * 3])
    assert (last.picked is None) is not picked
    assert last.picked is None or int(last.picked[0, 2]) == 24


def test_a_row_that_is_no_distribution_is_refused_where_it_is_read() -> None:
    logits = logits_of()
    logits[5, 3] = torch.nan
    whole = StepOutput(logits)
    first, _, last = parts_of(whole)
    assert finite_argmax(logits).tolist() == [*whole.best]
    assert first.argmax(0) == int(logits[0].argmax())
    assert last.argmax(0) == int(logits[4].argmax())
    with pytest.raises(NumericalError, match=f"1 of {VOCAB} are NaN"):
        last.argmax(2)
    last.own = [3, -1, 4]
    assert last.decided(3) == 4
    with pytest.raises(NumericalError, match=f"1 of {VOCAB} are NaN"):
        last.decided(2)


def test_what_a_drafter_keeps_holds_no_logits() -> None:
    """An output goes when it is let go, without the garbage collector, though its parts know it."""
    gc.disable()
    try:
        logits, out = logits_of(), torch.randn(11, 4)
        whole = StepOutput(logits, out=out, hidden={1: out})
        parts, seen = parts_of(whole), weakref.ref(logits)
        parts[2].fetch()
        kept = parts[0].hidden
        del logits, whole, parts
        assert seen() is None
        assert torch.equal(kept[1], out[:4])
    finally:
        gc.enable()
