"""Quantised weights in their file's format: blocks of codes and scales, which products decode while they read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import addressof, sizeof
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from specdec.native.formats import WeightFormat
from specdec.native.library import library
from specdec.native.types import PANEL, CPart, CProduct, Kind
from specdec.runners.linear import PackedWeight
from specdec.runners.memory_pages import HugePages, release_pages, trim_heap
from specdec.step.torch_switches import HOST

__all__ = ["BlockRows", "BlockTensor", "BlockWeight", "in_bytes"]

_PAGES = HugePages()
_AT_ONCE = 1 << 18  # weights that the reference dequantises at a time
_BYTES_AT_ONCE = 8 << 20  # bytes of the file that are copied into panels at a time
_CHUNK = 32  # inputs of a row that share a scale


def in_bytes(rows: torch.Tensor, near: float = 0.0) -> torch.Tensor:
    """[..., in] the rows' values after rounding to bytes; 32 inputs share a scale, their largest magnitude over 127.

    A value between two bytes that is nearer than ``near`` of their distance to the middle becomes the further byte.
    """
    chunks = rows.detach().float().reshape(*rows.shape[:-1], -1, _CHUNK)
    largest = chunks.abs().amax(-1, keepdim=True)
    small = largest < 2.0**-112
    exact = chunks * (127 / largest).masked_fill(small, 0.0)
    whole = exact.round()
    if near:
        left = exact - whole
        whole = torch.where(left.abs() > 0.5 - near, whole + left.sign(), whole)
    return (whole * (largest / 127).masked_fill(small, 0.0)).view(rows.shape).to(rows.dtype)


class BlockRows(Protocol):
    """[outputs, bytes of a row] blocks that are made of a file's tensors as they are read."""

    shape: tuple[int, int]

    def __len__(self) -> int:
        """Outputs."""

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Some rows' blocks, uint8."""

    def release(self) -> None:
        """Drop the pages of what they are made of, which would come from the file again."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """A weight's blocks, memory-mapped from the file.

    Attributes:
        format: of the blocks.
        blocks: [outputs, bytes of a row] uint8, mapped; or rows that are made as they are read.
        order: [outputs] which of these rows stands in each place; None: in the file's own order.
    """

    format: WeightFormat
    blocks: np.ndarray | BlockRows
    order: np.ndarray | None = None

    @property
    def outputs(self) -> int:
        return len(self.blocks)

    @property
    def inputs(self) -> int:
        return int(self.blocks.shape[1]) // int(self.format.bytes) * int(self.format.values)

    def rows(self, first: int, last: int) -> np.ndarray:
        """[last - first, bytes of a row] the blocks of these rows, in their order."""
        if self.order is None or not isinstance(self.blocks, np.ndarray):
            return np.ascontiguousarray(self.blocks[first:last])
        return np.ascontiguousarray(self.blocks[self.order[first:last]])

    def release(self, first: int, last: int) -> None:
        """Drop pages of the file that were read for these rows."""
        if isinstance(self.blocks, np.ndarray):
            release_pages(self.blocks[first:last])
        elif last == self.outputs:
            self.blocks.release()

    def dequantised(self, first: int, last: int) -> torch.Tensor:
        """[last - first, in] float32: what these rows stand for, of a GGUF file as the package gguf has it."""
        rows = self.rows(first, last)
        found = torch.empty(last - first, self.inputs, dtype=torch.float32, device=HOST)
        count = rows.nbytes // int(self.format.bytes)
        threads = torch.get_num_threads()
        library().specdec_dequantise(self.format.number, rows.ctypes.data, count, found.data_ptr(), threads)
        self.release(first, last)
        return found


class BlockWeight(PackedWeight):
    """Weights that multiply the same rows, stacked, each in its own format.

    With ``as_in_file``, the blocks stay in the file and are only looked up.

    In bfloat16, the rows that multiply the weights are rounded to 16-bit integers; 32 inputs share a power of two as
    their scale. Codes are integers, so a group's sum is an exact integer. In float32, rows are not rounded. With
    ``int8``, rows of either dtype are rounded to bytes, and 32 inputs share a scale: less exact, but faster. Rows are
    never rounded where codes stand for float32 numbers. The order of a row's sums never depends on the other rows.

    Attributes:
        near: see :func:`in_bytes`; of rows that the dequantised weights multiply.
    """

    near = 0.0

    def __init__(
        self,
        parts: Sequence[BlockTensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        as_in_file: bool = False,
        int8: bool = False,
    ) -> None:
        self._in_integers = all(part.format.has_integers for part in parts)
        self.dtype, self.parts, self.int8 = dtype, parts, int8 and self._in_integers
        self.outputs, self.inputs = sum(part.outputs for part in parts), parts[0].inputs
        self.bias = None if bias is None else bias.detach().clone()
        self._full_bias = None if self.bias is None else self.bias.float().contiguous()
        self._library = library()
        self._file = [part.rows(0, part.outputs) for part in parts] if as_in_file else []
        self._held = () if as_in_file else tuple(self._laid(part) for part in parts)
        places = [rows.ctypes.data for rows in self._file] or [panels.data_ptr() for panels in self._held]
        self._parts = (CPart * len(parts))(
            *(CPart(at, part.format.number, part.outputs, as_in_file) for at, part in zip(places, parts, strict=True))
        )
        self.described = self._product(0, len(parts))

    def _product(self, first: int, last: int) -> CProduct:
        """The library's description of the parts from ``first`` to ``last``."""
        before = sum(part.outputs for part in self.parts[:first])
        rounded = self.dtype is torch.bfloat16 and self._in_integers
        whole = Kind.QUANTISED if rounded else Kind.EXACT_QUANTISED
        return CProduct(
            bias=None if self._full_bias is None else self._full_bias.data_ptr() + 4 * before,
            inputs=self.inputs,
            outputs=sum(part.outputs for part in self.parts[first:last]),
            kind=Kind.INT8_QUANTISED if self.int8 else whole,
            parts=addressof(self._parts) + first * sizeof(CPart),
            count=last - first,
        )

    def _laid(self, part: BlockTensor) -> torch.Tensor:
        """The blocks in panels."""
        number, size = part.format.number, self._library.specdec_panel_bytes
        panels = _PAGES.take(size(number, part.outputs, part.inputs))
        some = max(1, _BYTES_AT_ONCE // (PANEL * part.blocks.shape[1])) * PANEL
        for first in range(0, part.outputs, some):  # so that few pages of the file stand beside what is laid of them
            last = min(first + some, part.outputs)
            rows = part.rows(first, last)
            self._library.specdec_lay_blocks(
                number,
                rows.ctypes.data,
                last - first,
                part.inputs,
                panels.data_ptr() + size(number, first, part.inputs),
                torch.get_num_threads(),
            )
            part.release(first, last)
        trim_heap()  # of blocks that were made for it: they leave free memory that nothing else fits into
        return panels

    def dequantised(self, first: int, last: int) -> Iterator[torch.Tensor]:
        """Yield rows [first, last) in float32, some at a time, from the file's blocks."""
        some = max(1, _AT_ONCE // self.inputs)
        start = 0
        for part in self.parts:
            begin, end = max(first - start, 0), min(last - start, part.outputs)
            for row in range(begin, end, some):
                yield part.dequantised(row, min(row + some, end))
            start += part.outputs

    def linear(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        """[..., out] hidden states times the weight's ``rows``. In the weight's dtype this equals decoding. In another
        dtype, or where gradients are needed, the dequantised weights multiply; rows are rounded to bytes where decoding
        does so.
        """
        starts = [0, *accumulate(part.outputs for part in self.parts)]
        if (
            hidden.dtype is self.dtype
            and not hidden.requires_grad
            and not self._file
            and {rows.start, rows.stop} <= {*starts}
        ):
            product = self._product(starts.index(rows.start), starts.index(rows.stop))
            found = self._multiplied(product, hidden.reshape(-1, self.inputs), None)
        else:
            if self.int8:
                read = in_bytes(hidden, self.near)
                hidden = hidden + (read - hidden).detach()  # gradients pass as if nothing were rounded
            found = self._by_dequantised(hidden, rows)
            found = found if self.bias is None else found + self.bias[rows].to(hidden.dtype)
        return found.view(*hidden.shape[:-1], -1)

    def _by_dequantised(self, hidden: torch.Tensor, rows: slice) -> torch.Tensor:
        weights = (weight.to(hidden.dtype) for weight in self.dequantised(rows.start, rows.stop))
        if hidden.requires_grad:
            return torch.cat([F.linear(hidden, weight) for weight in weights], dim=-1)
        # Results that are kept one by one would lie between the freed weights, so that the heap grows by these.
        found = hidden.new_empty(*hidden.shape[:-1], rows.stop - rows.start)
        at = 0
        for weight in weights:
            found[..., at : at + len(weight)] = F.linear(hidden, weight)
            at += len(weight)
        return found
