"""Rows of several sequences in one forward: their blocks one after the other, without padding.

Keys and values are stored in, and read from, each block's own cache, so that a row's numbers do not depend on the
other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.step import device_copies
from specdec.step.block import MOST_REPLAYED, Block, Rows
from specdec.step.device_copies import Views
from specdec.step.visibility import bucket

__all__ = ["Batch", "rows_of"]


class Batch(Rows):
    """Blocks of several sequences, each with its own cache, as the rows of one forward.

    Where such rows come ``again`` on a device, the arrays of ``step`` have one more dimension: sequences,
    padded to a power of two, each with its rows padded to the longest. ``spread`` [sequences x rows] is the number of
    the row at each place, and ``packed`` [T] is the place of each row.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        ends = list(accumulate(block.rows for block in blocks))
        self._parts = [(block, end - block.rows, end) for block, end in zip(blocks, ends, strict=True)]
        self.rows, self.start, self.end = ends[-1], None, max(block.end for block in blocks)
        self.backend = blocks[0].backend
        self.again, self.sent = all(block.again and block.apart for block in blocks), {}
        self._brought = not any(block.apart for block in blocks)
        if self.again:
            rows = bucket(max(block.rows for block in blocks))
            self.again = bucket(len(blocks)) * rows <= MOST_REPLAYED

    def send(self) -> None:
        """Copy to the device what this batch and its blocks need there, in one copy."""
        if self._brought:
            return
        self._brought, blocks = True, [block for block, _, _ in self._parts]
        unsent = [block.unsent for block in blocks]
        arrays = self._stacked() if self.again else {}
        whole = [name for name in ("tokens", "positions") if all(name in each for each in unsent)]
        for name in whole:  # one array for all rows, of which each block has its part
            arrays[name] = np.concatenate([each[name] for each in unsent], 1)
        own = [*arrays]
        for number, each in enumerate(unsent):
            arrays |= {f"{number} {name}": array for name, array in each.items() if name not in whole}
        found = device_copies.copy_in(arrays, blocks[0].device or torch.device("cpu"))
        self.sent = {name: found[name] for name in own}
        for number, ((block, first, _), each) in enumerate(zip(self._parts, unsent, strict=True)):
            if each:
                places = {
                    name: found.places[name if name in whole else f"{number} {name}"] + (name in whole) * 8 * first
                    for name in each
                }
                block.sent = Views(found.buffer, each, places)

    def _stacked(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that kernels read for all sequences, with the place of each row."""
        blocks = [block for block, _, _ in self._parts]
        self.shapes = {name: _stacked([block.shapes[name] for block in blocks]) for name in blocks[0].shapes}
        # Kernels divide by the slots of a padded sequence, too.
        self.shapes["table"][len(blocks) :] = blocks[0].shapes["table"]
        sequences, rows, _ = self.shapes["closure"].shape
        packed = [rows * number + row for number, block in enumerate(blocks) for row in range(block.rows)]
        spread = np.zeros(sequences * rows, dtype=np.int64)
        spread[packed] = np.arange(self.rows)
        step = np.empty(device_copies.pack(self.shapes)[1], dtype=np.uint8)
        device_copies.fill(step, self.shapes)
        return {"step": step, "spread": spread, "packed": np.array(packed, dtype=np.int64)}

    @property
    def ids(self) -> Sequence[int]:
        return [token for block, _, _ in self._parts for token in block.ids]

    @property
    def parts(self) -> Sequence[tuple[Block, int, int]]:
        self.send()
        return self._parts

    @property
    def tokens(self) -> torch.Tensor:
        if any(block.apart for block, _, _ in self.parts):
            if "tokens" in self.sent:
                return self.sent["tokens"]
            return torch.cat([block.tokens for block, _, _ in self.parts], 1)
        return torch.tensor([self.ids])

    @cached_property
    def positions(self) -> torch.Tensor:
        parts = self.parts
        if "positions" in self.sent:
            return self.sent["positions"]
        return torch.cat([block.positions for block, _, _ in parts], 1)

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        for block, first, last in self.parts:
            block.store(keys[:, :, first:last], values[:, :, first:last], layer)


def _stacked(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """One array per sequence, stacked and padded with zeros, for a power of two sequences."""
    shape = np.max([array.shape for array in arrays], 0)
    stacked = np.zeros((bucket(len(arrays)), *shape), dtype=arrays[0].dtype)
    for own, array in zip(stacked, arrays, strict=False):
        own[tuple(map(slice, array.shape))] = array
    return stacked


def rows_of(blocks: Sequence[Block]) -> Rows:
    """The rows of a forward of one sequence or several."""
    return Batch(blocks) if len(blocks) > 1 else blocks[0]
