"""The products of a single row, with what stands before and after each: four launches of a layer, besides attention's.

A plain step reads every weight once, for one row. What its layers do besides is little, but each launch waits for the
one before it. So sums, norms and gates are taken where a product begins or ends: every program norms the row for
itself, as it is small and at hand. More rows than one are products of matrices, which are left to cuBLAS.

Tested as :mod:`specdec.kernels.tree` is.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.kernels.tree import on_device

__all__ = ["constants", "row_product"]

_BYTES = 2048  # of a weight's row that a program reads at once; eight rows of them are enough to keep memory busy


@triton.jit(do_not_specialize=("epsilon",))
def _row(
    x, norm, weight, bias, residual, output, epsilon,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = own < OUTPUTS
    at = tl.arange(0, WIDE)
    element = output.dtype.element_ty
    length = 1.0
    if NORMED:
        squares = tl.zeros([WIDE], tl.float32)
        for start in range(0, INPUTS, WIDE):
            part = tl.load(x + start + at, mask=start + at < INPUTS, other=0.0).to(tl.float32)
            squares += part * part
        length = tl.sqrt(tl.sum(squares, 0) / INPUTS + epsilon)
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    others = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, INPUTS, WIDE):
        inside = start + at < INPUTS
        part = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        if NORMED:
            part = part / length * tl.load(norm + start + at, mask=inside, other=0.0).to(tl.float32)
            part = part.to(element).to(tl.float32)
        there = weight + own[:, None].to(tl.int64) * INPUTS + start + at[None, :]
        mask = live[:, None] & inside[None, :]
        sums += tl.load(there, mask=mask, other=0.0).to(tl.float32) * part[None, :]
        if GATED:
            others += tl.load(there + OUTPUTS * INPUTS, mask=mask, other=0.0).to(tl.float32) * part[None, :]
    result = tl.sum(sums, 1)
    if BIASED:
        result += tl.load(bias + own, mask=live, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(others, 1)
        if BIASED:
            up += tl.load(bias + OUTPUTS + own, mask=live, other=0.0).to(tl.float32)
        first = result.to(element).to(tl.float32)
        result = (first / (1.0 + tl.exp(-first))).to(element).to(tl.float32) * up.to(element).to(tl.float32)
    if ADDS:
        result = result.to(element).to(tl.float32) + tl.load(residual + own, mask=live, other=0.0).to(tl.float32)
    tl.store(output + own, result.to(element), mask=live)


def constants(inputs: int, outputs: int, itemsize: int, **flags: bool) -> dict[str, Any]:
    """What the kernel is compiled for; ``flags`` are NORMED, BIASED, GATED and ADDS."""
    wide = min(_BYTES // itemsize, triton.next_power_of_2(inputs))
    return {"INPUTS": inputs, "OUTPUTS": outputs, "ROWS": 4 if flags["GATED"] else 8, "WIDE": wide, **flags}


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """``weight`` [O, I] times a row [1, I], plus ``bias`` [O]: [1, O], rounded wherever torch's operations would round.

    Args:
        norm: weight [I] and epsilon of an RMS norm of ``x`` before.
        residual: [1, O], which is added afterwards.
        gated: SiLU of the first half of the product times the second one, [1, O / 2].
    """
    outputs = len(weight) // 2 if gated else len(weight)
    fixed = constants(
        weight.shape[1], outputs, x.element_size(),
        NORMED=norm is not None, BIASED=bias is not None, GATED=gated, ADDS=residual is not None,
    )  # fmt: skip
    output = x.new_empty(1, outputs)
    scale, epsilon = (x, 0.0) if norm is None else norm
    launch: Any = _row[(triton.cdiv(outputs, fixed["ROWS"]),)]
    with on_device(x):
        launch(
            x, scale, weight, x if bias is None else bias, x if residual is None else residual, output, epsilon, **fixed
        )
    return output
