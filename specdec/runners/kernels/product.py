"""Products with a weight in which a row's bits do not depend on how many rows there are.

In libraries the split of the sum over the inputs depends on the number of rows, so results differ (He et al. 2025,
"Defeating Nondeterminism in LLM Inference"). Here the weight's shape fixes it: the inputs are cut into ``SPLITS``
ranges, the tensor cores sum each range from first to last input in float32, and the kernel that reads the result adds
the ranges in order. The weight's rows are the cores' rows and the activations their columns, so that a few rows read
the weight at the speed of memory. Columns without a row are computed as well, which takes no longer than reading the
weight.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.launch import after_former, early, on_device

__all__ = ["BUCKETS", "Cut", "buckets_of", "cut_of", "cuts_of", "product", "shared_of", "splits_of"]

BUCKETS = (16, 32, 64, 128, 256)
"""Rows of activations in one program; more than the last are several programs' affair."""

_PROGRAMS = 330  # two to three for each of an H100's 132 processors, so that all of them run at once
_AHEAD = 256  # inputs of a weight's row that are read into the cache before the kernel ahead has ended


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into programs.

    Attributes:
        tile: outputs of a program.
        step: inputs that it takes at a time.
        splits: ranges of inputs; it alone decides on the numbers.
        warps, stages: as Triton has them.
    """

    tile: int
    step: int
    splits: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=("rows",))
def _product(
    activations, weight, bias, output, rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, BUCKET: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = (INPUTS + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    split = tl.program_id(1)
    own = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # Outputs beyond the last are computed from the first ones, and not stored: no mask in the way of wide reads.
    weights = weight + (own % OUTPUTS).to(tl.int64) * INPUTS
    first = split * PER
    if PDL and AHEAD > 0:
        ahead = weights + tl.minimum(first, INPUTS - AHEAD)
        tl.inline_asm_elementwise(
            "{ cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0; }", "=r,l", [ahead],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        if GATED:
            tl.inline_asm_elementwise(
                "{ cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0; }", "=r,l", [ahead + OUTPUTS * INPUTS],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
    after_former(PDL)
    row = tl.program_id(2) * BUCKET + tl.arange(0, BUCKET)
    live = row < rows
    given = activations + row.to(tl.int64) * INPUTS
    total = tl.zeros([TILE, BUCKET], tl.float32)
    second = tl.zeros([TILE, BUCKET], tl.float32)
    for start in range(first, tl.minimum(first + PER, INPUTS), STEP):
        at = start + tl.arange(0, STEP)
        if INPUTS % STEP == 0:
            x = tl.load(given[None, :] + at[:, None], mask=live[None, :], other=0.0)
            w = tl.load(weights[:, None] + at[None, :])
        else:
            x = tl.load(given[None, :] + at[:, None], mask=live[None, :] & (at < INPUTS)[:, None], other=0.0)
            w = tl.load(weights[:, None] + at[None, :], mask=(at < INPUTS)[None, :], other=0.0)
        total = tl.dot(w, x, total)
        if GATED:
            if INPUTS % STEP == 0:
                w = tl.load(weights[:, None] + OUTPUTS * INPUTS + at[None, :])
            else:
                w = tl.load(weights[:, None] + OUTPUTS * INPUTS + at[None, :], mask=(at < INPUTS)[None, :], other=0.0)
            second = tl.dot(w, x, second)
    element = activations.dtype.element_ty
    fits = (own < OUTPUTS)[:, None] & live[None, :]
    if BIASED:
        bias += own % OUTPUTS
        if split == 0:
            total += tl.load(bias).to(tl.float32)[:, None]
            if GATED:
                second += tl.load(bias + OUTPUTS).to(tl.float32)[:, None]
    if GATED:
        gate = total.to(element).to(tl.float32)
        shut = (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32)
        total = shut * second.to(element).to(tl.float32)
    there = output + (split * rows + row).to(tl.int64)[None, :] * OUTPUTS + own[:, None]
    tl.store(there, total.to(output.dtype.element_ty), mask=fits)


@cache
def splits_of(outputs: int, inputs: int, gated: bool) -> int:
    """Ranges of inputs, all of one size, for a weight [outputs, inputs]; a ``gated`` one is of two such weights."""
    turns, tiles = triton.cdiv(inputs, _step(inputs)), triton.cdiv(outputs, 64)
    even = [splits for splits in range(1, min(turns, 16) + 1) if turns % splits == 0 and not (gated and splits > 1)]
    return min(even, key=lambda one: max(tiles * one / _PROGRAMS, _PROGRAMS / (tiles * one)))


def _step(inputs: int) -> int:
    return 128 if inputs % 128 == 0 else 64


def buckets_of(shared: int) -> tuple[int, ...]:
    """Those of a device whose programs have so many bytes; a smaller one has too few registers for the last."""
    return BUCKETS if shared >= 200 << 10 else BUCKETS[:-1]


@cache
def cut_of(outputs: int, inputs: int, gated: bool, bucket: int, shared: int = 227 << 10) -> Cut:
    """How such a weight is cut for a bucket of rows on a device whose programs have so many ``shared`` bytes.

    Measured on an H100 with the products of a 7 B model, see docs/gpu.md; what reads 2.6 to 2.95 of 3.06 TB/s for few.
    """
    splits, step = splits_of(outputs, inputs, gated), _step(inputs)
    tile, warps, stages = 64, 4, 4 if bucket <= 32 else 3
    if bucket > 128:
        tile, step, warps, stages = 64 if gated else 128, 64, 8, 4
    elif bucket > 64 and len(buckets_of(shared)) < len(BUCKETS):
        warps = 8
    elif step == 64:
        stages = 6 if bucket <= 32 else 4
    each = 2 * step * (tile * (2 if gated else 1) + bucket)
    return Cut(tile, step, splits, warps, max(2, min(stages, (shared - 4096) // each)))


def cuts_of(outputs: int, inputs: int, gated: bool, bucket: int, shared: int = 227 << 10) -> list[Cut]:
    """The cuts of such a product that a device can run and that give the same numbers; :func:`cut_of` takes one."""
    splits, found = splits_of(outputs, inputs, gated), []
    for tile, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4, 5, 6)):
        # All steps of a split are of one size, so that its range ends where it does.
        step = _step(inputs)
        if 2 * step * (tile * (2 if gated else 1) + bucket) * stages <= shared - 4096 and tile * bucket <= 1 << 14:
            found.append(Cut(tile, step, splits, warps, stages))
    return found


@cache
def shared_of(device: torch.device) -> int:
    """Bytes that a program may share on a device."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(known, "shared_memory_per_block_optin", 227 << 10))


def product(
    activations: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    cut: Cut | None = None,
    whole: bool = False,
) -> torch.Tensor:
    """``activations`` [T, in] times a weight [out, in]: [T, out], or float32 [splits, T, out] that are to be added.

    Args:
        activations: float16 or bfloat16, contiguous.
        gated: the weight is of two, one above the other, and the result SiLU of the first product times the second.
        cut: another one than :func:`cut_of` gives; with as many splits it is the same product, bit for bit.
        whole: never in parts.
    """
    rows, inputs = activations.shape
    outputs = len(weight) // (2 if gated else 1)
    shared = shared_of(activations.device)
    buckets = buckets_of(shared)
    bucket = next((size for size in buckets if rows <= size), buckets[-1])
    cut = cut or cut_of(outputs, inputs, gated, bucket, shared)
    if whole and cut.splits > 1:
        cut = replace(cut, splits=1)
    shape = (rows, outputs) if cut.splits == 1 else (cut.splits, rows, outputs)
    dtype = activations.dtype if cut.splits == 1 else torch.float32
    output = torch.empty(shape, dtype=dtype, device=activations.device)
    launch: Any = _product[(triton.cdiv(outputs, cut.tile), cut.splits, triton.cdiv(rows, bucket))]
    with on_device(activations):
        launch(
            activations.contiguous(), weight, weight if bias is None else bias, output, rows,
            OUTPUTS=outputs, INPUTS=inputs, TILE=cut.tile, STEP=cut.step, BUCKET=bucket, SPLITS=cut.splits,
            GATED=gated, BIASED=bias is not None, AHEAD=_AHEAD if inputs % 8 == 0 and inputs >= _AHEAD else 0,
            num_warps=cut.warps, num_stages=cut.stages, **early(activations.device),
        )  # fmt: skip
    return output
