"""The beginning of a recorded step, in Triton: embeddings, cosines and sines of all rows, looked up by one launch.

Tokens and positions are read from the step's arrays, and where the tables of cosines and sines are from the device's
memory, as the tables grow with the texts. So one graph serves all steps. Numbers are copied as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.launch import after_former, early, on_device

__all__ = ["look_up"]

_PART = 1024  # numbers of an embedding that a program copies


@triton.jit(do_not_specialize=("rows", "reach", "width"))
def _look_up(
    tokens, counts, places, tables, weight, hidden, cosines, sines, rows, reach, width,
    TURNED: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    sequence, own = row // rows, row % rows
    after_former(PDL)
    if part == 0:
        element = cosines.dtype.element_ty
        at = tl.arange(0, WIDE)
        inside = at < TURNED
        place = tl.minimum(tl.load(counts + 3 * sequence + 1) + own, reach - 1)
        position = tl.load(places + sequence * reach + place) * TURNED + at
        there = row.to(tl.int64) * TURNED + at
        cos = tl.load(tables).to(tl.pointer_type(element))
        sin = tl.load(tables + 1).to(tl.pointer_type(element))
        tl.store(cosines + there, tl.load(cos + position, mask=inside), mask=inside)
        tl.store(sines + there, tl.load(sin + position, mask=inside), mask=inside)
    at = part * PART + tl.arange(0, PART)
    inside = at < width
    token = tl.maximum(tl.load(tokens + row), 0)  # below 0 stands for logits that are none, which ends the text
    tl.store(hidden + row.to(tl.int64) * width + at, tl.load(weight + token * width + at, mask=inside), mask=inside)


def look_up(
    where: Mapping[str, torch.Tensor],
    tables: torch.Tensor,
    turned: int,
    like: torch.Tensor,
    weight: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Embeddings [B, D], cosines and sines [B, d] of the rows of one sequence or several; rows that fill up have any.

    Args:
        where: of the rows, see :mod:`specdec.runners.packed_step`; ``tokens`` among its arrays.
        tables: int64 [2], the addresses of the cosines and of the sines [positions, d].
        turned: d.
        like: of the tables' dtype.
        weight: [V, D], contiguous; None where the rows' hidden states are there already.
    """
    tokens, counts, places = where["tokens"], where["counts"], where["places"]
    rows, width = tokens.numel(), 0 if weight is None else weight.shape[1]
    cos, sin = (like.new_empty(rows, turned) for _ in range(2))
    hidden = like.new_empty(rows, width)
    launch: Any = _look_up[(rows, max(1, triton.cdiv(width, _PART)))]
    with on_device(tokens):
        launch(
            tokens, counts, places, tables, like if weight is None else weight, hidden, cos, sin,
            tokens.shape[-1], places.shape[-1], width,
            TURNED=turned, WIDE=triton.next_power_of_2(turned), PART=_PART, num_warps=4, **early(tokens.device),
        )  # fmt: skip
    return None if weight is None else hidden, cos, sin
