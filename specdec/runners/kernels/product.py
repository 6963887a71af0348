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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.launch import after_former, early, on_device

__all__ = [
    "BUCKETS",
    "Cut",
    "bucket_of",
    "buckets_of",
    "cut_of",
    "cuts_of",
    "offered",
    "product",
    "shared_of",
    "splits_of",
]

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
        rows: rows of activations of a program.
    """

    tile: int
    step: int
    splits: int
    warps: int
    stages: int
    rows: int


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


def bucket_of(rows: int, shared: int = 227 << 10) -> int:
    """The smallest bucket of ``rows`` rows, by the ``shared`` bytes of a program; else the largest."""
    return next((size for size in buckets_of(shared) if rows <= size), buckets_of(shared)[-1])


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
    usual = Cut(tile, step, splits, warps, stages, bucket)
    return replace(usual, stages=max(2, min(stages, _most_stages(usual, gated, shared))))


def _most_stages(cut: Cut, gated: bool, shared: int) -> int:
    """How many steps of weights and activations a program can hold."""
    return (shared - 4096) // (2 * cut.step * (cut.tile * (2 if gated else 1) + cut.rows))


def _runs(cut: Cut, gated: bool, shared: int) -> bool:
    """Whether a program's memory suffices, and its registers: half of them may hold sums, 128 of 32 lanes a warp.

    Each lane must also have 16 bytes of the activations to read. A device without the last bucket needs more warps and
    smaller tiles for many rows.
    """
    sums = cut.tile * cut.rows * (2 if gated else 1)
    fits = 2 <= cut.stages <= _most_stages(cut, gated, shared) and sums <= cut.warps << 12
    large = cut.rows > 64 and (cut.tile > 64 or cut.warps < 8)
    return fits and cut.step * cut.rows >= cut.warps << 8 and not (large and len(buckets_of(shared)) < len(BUCKETS))


def cuts_of(outputs: int, inputs: int, gated: bool, bucket: int, shared: int = 227 << 10) -> list[Cut]:
    """The cuts of such a product that a device can run and that give the same numbers; :func:`cut_of` takes one.

    A tile of 32 outputs is none: tensor cores with an instruction for 64 take another one for them.
    """
    usual = cut_of(outputs, inputs, gated, bucket, shared)
    kinds = itertools.product((64, 128), (4, 8), (2, 3, 4, 5, 6))
    every = [replace(usual, tile=tile, warps=warps, stages=stages) for tile, warps, stages in kinds]
    return [cut for cut in every if _runs(cut, gated, shared)]


def offered(outputs: int, inputs: int, gated: bool, bucket: int, shared: int = 227 << 10) -> list[Cut]:
    """The few cuts of :func:`cuts_of`, and one of fewer rows, among which the time of whole steps chooses.

    The first is :func:`cut_of`'s. All of them sum the same inputs in the same order.
    """
    usual = cut_of(outputs, inputs, gated, bucket, shared)
    deeper = min(usual.stages + 2, _most_stages(usual, gated, shared))
    other = replace(usual, tile=128 if usual.tile == 64 else 64, warps=8)
    others = [
        other if _runs(other, gated, shared) else replace(other, warps=usual.warps),
        replace(usual, warps=8 if usual.warps == 4 else 4),
        replace(usual, stages=deeper if deeper > usual.stages else usual.stages - 1),
        *([replace(usual, rows=bucket // 2)] if bucket > 32 else []),
    ]
    return [usual, *(cut for cut in others if _runs(cut, gated, shared))]


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
    cuts: Mapping[int, Cut] | None = None,
    whole: bool = False,
) -> torch.Tensor:
    """``activations`` [T, in] times a weight [out, in]: [T, out], or float32 [splits, T, out] that are to be added.

    Args:
        activations: float16 or bfloat16, contiguous.
        gated: the weight is of two, one above the other, and the result SiLU of the first product times the second.
        cuts: bucket -> another cut than :func:`cut_of` gives; with as many splits it is the same product, bit for bit.
        whole: never in parts.
    """
    rows, inputs = activations.shape
    outputs = len(weight) // (2 if gated else 1)
    shared = shared_of(activations.device)
    bucket = bucket_of(rows, shared)
    cut = (cuts or {}).get(bucket) or cut_of(outputs, inputs, gated, bucket, shared)
    if whole and cut.splits > 1:
        cut = replace(cut, splits=1)
    shape = (rows, outputs) if cut.splits == 1 else (cut.splits, rows, outputs)
    dtype = activations.dtype if cut.splits == 1 else torch.float32
    output = torch.empty(shape, dtype=dtype, device=activations.device)
    launch: Any = _product[(triton.cdiv(outputs, cut.tile), cut.splits, triton.cdiv(rows, cut.rows))]
    with on_device(activations):
        launch(
            activations.contiguous(), weight, weight if bias is None else bias, output, rows,
            OUTPUTS=outputs, INPUTS=inputs, TILE=cut.tile, STEP=cut.step, BUCKET=cut.rows, SPLITS=cut.splits,
            GATED=gated, BIASED=bias is not None, AHEAD=_AHEAD if inputs % 8 == 0 and inputs >= _AHEAD else 0,
            num_warps=cut.warps, num_stages=cut.stages, **early(activations.device),
        )  # fmt: skip
    return output
