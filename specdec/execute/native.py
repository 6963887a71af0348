"""NativeExecutor: a decoder in one call of C, by its spec, on a CPU.

Weights are stored in panels, one layer at a time, and nothing of a checkpoint stays beside them. The order of a row's
sums does not depend on the other rows. What runs at each step is in this file, what is made at load in
:mod:`specdec.execute.native_layers`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from ctypes import addressof, c_float, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.execute.native_layers import NativeLayers, Turns
from specdec.execute.torch import TorchExecutor
from specdec.native.library import check_done, library
from specdec.native.scores import Stored
from specdec.native.types import CHead, CRows
from specdec.runners.linear import PackedWeight
from specdec.runners.rows import Rows
from specdec.sampling.noise import key_at
from specdec.step.step_io import FINAL, StepInput
from specdec.step.step_output import StepOutput, Top
from specdec.step.torch_switches import HOST

__all__ = ["NativeExecutor", "NativeHead", "run_layers", "told_rows"]

_NO_HEAD = (None, None, None, 0, None, None, 0, None, None, None, None, None)


class NativeExecutor(TorchExecutor):
    """As :class:`TorchExecutor`, for what :func:`specdec.execute.native_layers.why_not` does not rule out.

    ``int8``: rows that quantised blocks are multiplied with are rounded to bytes.
    """

    name = "native"

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, int8: bool = False) -> None:
        super().__init__(checkpoint, dtype=dtype, device=torch.device("cpu"), int8=int8)
        spec, held, (head, norm) = self.spec, self._weights, (self._weights.head, self._weights.norm)
        self._native = NativeLayers(spec.layers, held.layers, spec.ropes)
        assert isinstance(head, PackedWeight)
        self._head = None if spec.head.cap else NativeHead(norm.by, norm.norm.eps, head)
        table = held.embedding if spec.embedding.scale == 1.0 else None
        self._table = addressof(table.described) if isinstance(table, PackedWeight) else None
        self._turns = Turns(self._ropes, spec.ropes)
        self.experts = self._native.experts

    @property
    def weights(self) -> list[PackedWeight] | None:
        """What a forward reads once, head included; None where it reads a part of it."""
        head: Any = self._weights.head
        return [*self._native.products, head] if self.experts is None else None

    def _through_one(self, hidden: torch.Tensor, step: StepInput, number: int) -> torch.Tensor:
        return run_layers(self._native, told_rows(step, self._turns), hidden, number, number + 1)[0]

    def attention(self) -> str:
        return "in the same call"

    def run(self, step: StepInput) -> StepOutput:
        if step.entering is not None:
            return super().run(step)
        last = step.plan.last
        return self._run(step, 0, len(self._layers) if last is None else last, None)

    def _run(self, step: StepInput, first: int, last: int, hidden: torch.Tensor | None) -> StepOutput:
        wanted, native, head, reading = step.wanted, self._native, self._head, None
        rows, tokens = told_rows(step, self._turns), None
        if hidden is None and self._table is None:
            hidden = self.embed(step.ids)
        elif hidden is None:
            tokens = step.ids
            rows[0].tokens, rows[0].embedding = tokens.__array_interface__["data"][0], self._table
        if last == len(self._layers):
            if head is None:
                return self._finished(Rows(step), last, *run_layers(native, rows, hidden, first, last, wanted.hidden))
            draws = None if wanted.draws is None else _first_draws(step)
            reading = head.reading(step.rows, wanted.logits, FINAL in wanted.hidden, wanted.top_k, draws)
        hidden, found = run_layers(native, rows, hidden, first, last, wanted.hidden, reading)
        del tokens  # the library has read them
        if last in wanted.hidden:
            found[last] = hidden
        scored = None if wanted.logits is None else wanted.logits.tolist()
        if reading is None:
            return StepOutput(None, scored, out=hidden, hidden=found)
        if reading.normed is not None:
            found[FINAL] = reading.normed
        best, drawn = reading.best[:], () if reading.drawn is None else reading.drawn[:]
        return StepOutput(
            reading.logits,
            scored,
            out=hidden,
            hidden=found,
            best=best,
            drawn=drawn,
            top=reading.top,
            stored=reading.stored,
        )

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        self._native.choose_all(True)
        try:
            with super().every_expert():
                yield
        finally:
            self._native.choose_all(False)


def _first_draws(step: StepInput) -> Mapping[int, tuple[float, int]]:
    """Temperature and key of the draw behind the first row of each sequence; the others are made along the path."""
    draws = step.wanted.draws
    assert draws is not None
    each = zip(step.starts, draws.start, draws.temperature, step.lengths, strict=False)
    return {row: (by, key_at(start, length + 1)) for row, start, by, length in each if by}


class NativeHead:
    """The last norm and a packed head, which the same call runs behind the last layer."""

    def __init__(self, weight: torch.Tensor, epsilon: float, product: PackedWeight) -> None:
        self._norm, self._product = weight.float().contiguous(), product
        self._head = CHead(product.described, self._norm.data_ptr(), epsilon)

    def reading(
        self,
        total: int,
        rows: npt.NDArray[np.int64] | None,
        final: bool,
        top_k: int = 1,
        draws: Mapping[int, tuple[float, int]] | None = None,
    ) -> Reading:
        """Buffers for reading ``total`` rows behind the last layer; ``draws``: rows to draw -> temperature and key."""
        product = self._product
        count, dtype = total if rows is None else len(rows), product.dtype
        normed = torch.empty(total, product.inputs, dtype=dtype, device=HOST) if final else None
        normed_at = None if normed is None else normed.data_ptr()
        wanted = None if rows is None else rows.__array_interface__["data"][0]
        best: ctypes.Array[c_int64] = (c_int64 * count)()
        logits = stored = top = tops = values = by = keys = drawn = address = None
        if count:
            logits = torch.empty(count, product.outputs, dtype=dtype, device=HOST)
            address = logits.data_ptr()
            stored = Stored(address, count, product.outputs, dtype is torch.bfloat16)
        most = min(top_k, product.outputs) if top_k > 1 else 0  # the largest score alone has a cheaper search
        if most:
            largest = array("q", bytes(8 * count * most)), array("f", bytes(4 * count * most))
            (tops, _), (values, _) = largest[0].buffer_info(), largest[1].buffer_info()
            top = Top(most, *largest)
        if draws and count:
            by, keys, drawn = (c_float * count)(), (c_uint64 * count)(), (c_int64 * count)()
            for place, row in enumerate(range(count) if rows is None else rows.tolist()):
                if row in draws:
                    by[place], keys[place] = draws[row]
        given = (self._head, normed_at, wanted, count, address, best, most, tops, values, by, keys, drawn)
        return Reading(normed, logits, stored, best, drawn, top, given, rows)


@dataclass(slots=True, eq=False)
class Reading:
    """The results of a call behind the last layer.

    Attributes:
        normed: [T, D] all rows after the last norm, or None where they are not asked for.
        logits: [R, V] logits of the rows asked for, or None.
        stored: address of the logits for the library, or None.
        best: [R] token with the largest logit, -1 where a row is not a distribution.
        drawn: [R] drawn tokens, -1 where no draw was made or rounding decides; None where no draws are asked for.
        top: the largest logits, where more than one a row is asked for.
        arguments: the library's arguments for this reading.
        rows: [R] the rows asked for, which they point at; None for all.
    """

    normed: torch.Tensor | None
    logits: torch.Tensor | None
    stored: Stored | None
    best: ctypes.Array[c_int64]
    drawn: ctypes.Array[c_int64] | None
    top: Top | None
    arguments: tuple[Any, ...]
    rows: npt.NDArray[np.int64] | None


def run_layers(
    layers: NativeLayers,
    rows: tuple[CRows, Any],
    hidden: torch.Tensor | None,
    first: int,
    last: int,
    taps: Collection[int] = (),
    reading: Reading | None = None,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Run [T, D] through layers [first, last); returns the result and, by layer, the inputs of layers in ``taps``.

    Where ``hidden`` is None, the ``rows`` bring tokens and an embedding. The call fills the ``reading``.

    Raises:
        IndexError: the embedding lacks a token.
        MemoryError: the library cannot allocate buffers for this number of rows.
    """
    told, _ = rows
    start, dtype = None, layers.dtype
    if hidden is not None:
        if hidden.dtype is not dtype or not hidden.is_contiguous():
            hidden = hidden.to(dtype).contiguous()
        start = hidden.data_ptr()
    out = torch.empty(told.rows, layers.shape.hidden, dtype=dtype, device=HOST)
    found: dict[int, torch.Tensor] = {}
    wanted = None
    if taps and (found := {tap: torch.empty_like(out) for tap in taps if first <= tap < last}):
        wanted = (c_void_p * last)(*(found[n].data_ptr() if n in found else None for n in range(last)))
    run = library().specdec_run_layers
    failed = run(
        layers.shape,
        layers.layers,
        told,
        start,
        out.data_ptr(),
        wanted,
        first,
        last,
        *(_NO_HEAD if reading is None else reading.arguments),
        torch.get_num_threads(),
    )
    if failed:
        check_done(failed, run, ())
    return out, found


def told_rows(step: StepInput, turns: Turns) -> tuple[CRows, Any]:
    """The rows as the library reads them, and what has to be kept until it has done so."""
    numbers, most = step.blocks()
    blocks = (c_int64 * len(numbers))(*numbers)
    known, cos_sin = turns.known
    if known < step.end:
        cos_sin = turns.reach(step.end)
    told = CRows(step.rows, len(step.texts), most, addressof(blocks), addressof(cos_sin))
    parts = None
    if step.plan.parts:
        parts = (c_uint8 * len(step.plan.parts))(*step.plan.parts)
        told.parts = addressof(parts)
    return told, (blocks, step, parts)
