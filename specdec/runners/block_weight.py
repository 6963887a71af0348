"""Quantised weights in their file's format: blocks of codes and scales, which products decode while they read."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from specdec.native.formats import WeightFormat
from specdec.native.library import library
from specdec.native.types import PANEL, CPart, CProduct, Kind
from specdec.runners.linear import PackedWeight
from specdec.runners.memory_pages import HugePages, release_pages, trim_heap

__all__ = ["BlockRows", "BlockTensor", "BlockWeight"]

_PAGES = HugePages()
_BYTES_AT_ONCE = 8 << 20  # bytes of the file that are copied into panels at a time


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


class BlockWeight(PackedWeight):
    """Weights that multiply the same rows, stacked, each in its own format.

    With ``as_in_file``, the blocks stay in the file and are only looked up.

    In bfloat16, the rows that multiply the weights are rounded to 16-bit integers; 32 inputs share a power of two as
    their scale. Codes are integers, so a group's sum is an exact integer. In float32, rows are not rounded. With
    ``int8``, rows of either dtype are rounded to bytes, and 32 inputs share a scale: less exact, but faster. Rows are
    never rounded where codes stand for float32 numbers. The order of a row's sums never depends on the other rows.
    """

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
        self.described = self._product()

    def _product(self) -> CProduct:
        """The library's description of it."""
        rounded = self.dtype is torch.bfloat16 and self._in_integers
        whole = Kind.QUANTISED if rounded else Kind.EXACT_QUANTISED
        return CProduct(
            bias=None if self._full_bias is None else self._full_bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            kind=Kind.INT8_QUANTISED if self.int8 else whole,
            parts=addressof(self._parts),
            count=len(self.parts),
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
