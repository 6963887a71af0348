"""A short convolution over the rows of a forward, each of which reads its own inputs and those of the tokens before it.

These are its ancestors in the tree, then committed tokens, then nothing. Their inputs are in the layer's slots, as keys
without values: a window is all that a convolution remembers of a text.
"""

from __future__ import annotations

import torch

from specdec.execute.layer import LayerWeights
from specdec.runners.rows import Rows, TextRows

__all__ = ["convolved", "gated_conv"]


def gated_conv(rows: Rows, layer: int, weights: LayerWeights, reads: torch.Tensor) -> torch.Tensor:
    """[T, D] what a layer's gated short convolution gives, for the rows' [T, D]."""
    assert weights.qkv is not None
    assert weights.taps is not None
    before, after, inputs = weights.qkv(reads).chunk(3, -1)
    return after * convolved(rows, layer, *weights.taps, before * inputs)


def convolved(
    rows: Rows, layer: int, taps: torch.Tensor, bias: torch.Tensor | None, inputs: torch.Tensor
) -> torch.Tensor:
    """[T, D] the inputs [T, D] of the rows convolved by ``taps`` [W, D], after they are stored.

    A row's numbers do not depend on the rows beside it: they are added one by one, the oldest first.
    """
    count, width = inputs.shape
    rows.store(inputs.view(1, 1, count, width), inputs.new_empty(1, 1, count, 0), layer)
    every = [_windows(part, layer, len(taps)) for part in rows.parts]
    wide = torch.promote_types(inputs.dtype, torch.float32)
    oldest, *newer = (every[0] if len(every) == 1 else torch.cat(every, 1)).to(wide)
    total = oldest * taps[0] if bias is None else torch.addcmul(bias, oldest, taps[0])
    for one, tap in zip(newer, taps[1:], strict=True):
        total = torch.addcmul(total, one, tap)
    return total.to(inputs.dtype)


def _windows(part: TextRows, layer: int, width: int) -> torch.Tensor:
    """[W, T, D] what each row's window has, the oldest first; zeros before the text."""
    slots, lacking = part.window_slots(part.cache.group_of[layer], width)
    held = part.cache.keys[layer][0, 0].index_select(0, slots.flatten()).view(*slots.shape, -1)
    return held if lacking is None else held.masked_fill_(lacking.unsqueeze(-1), 0)
