"""Layout: the slots that a block's rows see, as ranges that all rows see and a rest with a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Layout", "bucket", "slot_ranges"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of one group of layers that a block reads, split into those that all rows see and those that some see.

    Attributes:
        prefix: slot ranges [first, last) that every row sees.
        tail: slots with a mask: the window's edge, then the tree. A range where they are contiguous, else an index.
        mask: [T, tail] additive, 0 or -inf; None where every row sees the whole tail, or where ``causal`` is True.
        causal: the tail is the block's own chain, row i seeing the tail's first i + 1 keys.
    """

    prefix: tuple[tuple[int, int], ...]
    tail: tuple[int, int] | torch.Tensor
    mask: torch.Tensor | None
    causal: bool


def bucket(count: int) -> int:
    """The power of two that ``count`` rows are padded to where shapes are static."""
    return 1 << (count - 1).bit_length()


def slot_ranges(first: int, last: int, size: int) -> tuple[tuple[int, int], ...]:
    """The slot ranges of positions [first, last) on a ring of ``size``: none, one, or two where it wraps."""
    if first >= last:
        return ()
    start, stop = first % size, (last - 1) % size + 1
    return ((start, stop),) if start < stop else ((start, size), (0, stop))
