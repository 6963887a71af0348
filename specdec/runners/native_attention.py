"""Attention by the native library, over slots that hold the rows' keys and values.

A row's sums run over the keys of its own path, in one order, so its bits do not depend on the rows beside it. Torch's
kernels sum in another order for another number of rows or of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from functools import cache
from typing import Any

import torch

from specdec.native.library import library
from specdec.native.types import CRows, CShape
from specdec.runners.linear import why_not_packed
from specdec.step.step_io import StepInput

__all__ = ["attended", "c_rows", "computes"]


def computes(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the library is there and attends over slots of such keys and values."""
    return key_dim == value_dim and key_dim % 16 == 0 and why_not_packed(dtype, device) is None


def attended(
    query: torch.Tensor,
    rows: tuple[CRows, Any],
    layer: int,
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``query`` [1, Hq, T, D] over the slots that each row sees of a layer: [1, Hq, T, D].

    The layer's cache holds the rows' keys and values. ``sinks``: [Hq] scores of no key.
    """
    described, (_, step) = rows
    heads, dim = query.shape[1], query.shape[3]
    key_heads = step.texts[0].keys[layer].shape[1]
    asked = query.transpose(1, 2).contiguous()
    found = torch.empty_like(asked)
    scores = None if sinks is None else sinks.float().contiguous()
    library().specdec_attend(
        _shape(heads, key_heads, dim, query.dtype is torch.bfloat16),
        byref(described),
        layer,
        asked.data_ptr(),
        scale,
        cap or 0.0,
        None if scores is None else scores.data_ptr(),
        found.data_ptr(),
        torch.get_num_threads(),
    )
    return found.transpose(1, 2)


@cache
def _shape(heads: int, key_heads: int, dim: int, half: bool) -> CShape:
    return CShape(query_heads=heads, key_heads=key_heads, head_dim=dim, half=half, tiles=library().specdec_tiles())


def c_rows(step: StepInput, counts: Sequence[int] | None = None) -> tuple[CRows, Any]:
    """The rows of a forward as the library reads them, and what has to be kept until it has done so.

    ``counts``: of each sequence its last rows alone, as many as these.
    """
    numbers, most = step.blocks(counts)
    blocks = (c_int64 * len(numbers))(*numbers)
    total = step.rows if counts is None else sum(counts)
    return CRows(total, len(step.texts), most, addressof(blocks)), (blocks, step)
