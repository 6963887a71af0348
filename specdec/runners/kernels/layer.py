"""What stands between a layer's products, in Triton: three launches in the place of twelve.

Sums and norms are taken in float32 and rounded where torch's own operations would round. Compiled once per dtype and
width: no number that changes from step to step is specialised on. See :mod:`specdec.runners.kernels.step` for how
they are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.embedding import look_up
from specdec.runners.kernels.launch import after_former, early, on_device
from specdec.runners.kernels.pick import pick
from specdec.runners.kernels.product import buckets_of, offered, product, shared_of
from specdec.runners.kernels.step import page_of, paths, segments_of, step_attention
from specdec.runners.kernels.walk import walk

__all__ = [
    "add_norm",
    "buckets_of",
    "gate",
    "look_up",
    "offered",
    "paths",
    "pick",
    "product",
    "segments_of",
    "shared_of",
    "step_attention",
    "turn_and_store",
    "walk",
]

_BLOCK = 1024  # numbers of a program where rows do not matter


@triton.jit(do_not_specialize=("epsilon",))
def _add_norm(
    residual, delta, weight, total, normed, epsilon,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WIDE)
    inside = at < WIDTH
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0) * WIDTH + at
    after_former(PDL)
    x = tl.load(residual + row, mask=inside, other=0.0)
    if PARTS > 0:
        added = tl.load(delta + row, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(delta + part * tl.num_programs(0) * WIDTH + row, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(total + row, x, mask=inside)
    wide = x.to(tl.float32)
    length = tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    scaled = wide / length * gain
    tl.store(normed + row, scaled.to(normed.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + delta`` [T, D] and its RMS norm; without a ``delta`` the residual itself, and its norm.

    ``delta``: as :func:`specdec.runners.kernels.product.product` gives it, in parts or not.
    """
    rows, width = residual.shape
    residual = residual.contiguous()
    normed = torch.empty_like(residual)
    total = residual if delta is None else torch.empty_like(residual)
    launch: Any = _add_norm[(rows,)]
    wide = triton.next_power_of_2(width)
    with on_device(residual):
        launch(
            residual, residual if delta is None else delta.contiguous(), weight, total, normed, epsilon,
            WIDTH=width, WIDE=wide, PARTS=_parts(delta), num_warps=min(16, max(1, wide // 256)),
            **early(residual.device),
        )  # fmt: skip
    return total, normed


def _parts(values: torch.Tensor | None) -> int:
    """How many tensors [T, N] are to be added."""
    return 0 if values is None else len(values) if values.ndim == 3 else 1


# Places begin anywhere where they are those of one sequence of several.
@triton.jit(do_not_specialize=("layer", "layers", "each", "epsilon", "places"))
def _turn_and_store(
    heads, cosines, sines, places, query_weight, key_weight, query, counts, table,
    layer, layers, each, epsilon,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    PARTS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    sequence, own_row = row // each, row % each
    counts += 3 * sequence
    own_table = table + (2 if PAGE else 3) * (sequence * layers + layer)
    stored = own_row < tl.load(counts + 2)  # not a row that fills a bucket
    at = tl.arange(0, HALF)
    inside = at < WIDTH // 2
    own = heads + (row * (QUERIES + 2 * KEYS) + head) * WIDTH + at
    slot = tl.load(counts) + tl.load(counts + 1) + own_row
    place = tl.load(places + row) * WIDTH + at
    cos_x = tl.load(cosines + place, mask=inside, other=0.0).to(tl.float32)
    cos_y = tl.load(cosines + place + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    sin_x = tl.load(sines + place, mask=inside, other=0.0).to(tl.float32)
    sin_y = tl.load(sines + place + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
    if PAGE:
        page = tl.load(tl.load(own_table).to(tl.pointer_type(tl.int64)) + slot // PAGE, mask=stored, other=0)
        keys = page.to(tl.pointer_type(query.dtype.element_ty)) + tl.load(own_table + 1)
        values = keys + KEYS * PAGE * WIDTH
        slots = PAGE
    else:
        keys = tl.load(own_table).to(tl.pointer_type(query.dtype.element_ty))
        values = tl.load(own_table + 1).to(tl.pointer_type(query.dtype.element_ty))
        slots = tl.load(own_table + 2)
    slot %= slots
    after_former(PDL)  # all that was read so far has been there since the step began
    low = tl.load(own, mask=inside, other=0.0)
    high = tl.load(own + WIDTH // 2, mask=inside, other=0.0)
    size = tl.num_programs(0) * (QUERIES + 2 * KEYS) * WIDTH
    for part in tl.static_range(1, PARTS):
        low += tl.load(own + part * size, mask=inside, other=0.0)
        high += tl.load(own + part * size + WIDTH // 2, mask=inside, other=0.0)
    low, high = low.to(query.dtype.element_ty), high.to(query.dtype.element_ty)
    if head >= QUERIES + KEYS:  # a value is stored as it is
        there = values + ((head - QUERIES - KEYS) * slots + slot) * WIDTH + at
        tl.store(there, low, mask=inside & stored)
        tl.store(there + WIDTH // 2, high, mask=inside & stored)
    else:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if NORMED:
            length = tl.sqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / WIDTH + epsilon)
            x, y = x / length, y / length
            if head < QUERIES:
                x *= tl.load(query_weight + at, mask=inside, other=0.0).to(tl.float32)
                y *= tl.load(query_weight + WIDTH // 2 + at, mask=inside, other=0.0).to(tl.float32)
            else:
                x *= tl.load(key_weight + at, mask=inside, other=0.0).to(tl.float32)
                y *= tl.load(key_weight + WIDTH // 2 + at, mask=inside, other=0.0).to(tl.float32)
            x, y = x.to(low.dtype).to(tl.float32), y.to(low.dtype).to(tl.float32)
        turned_x = (x * cos_x - y * sin_x).to(low.dtype)
        turned_y = (y * cos_y + x * sin_y).to(low.dtype)
        if head < QUERIES:
            there = query + (row * QUERIES + head) * WIDTH + at
        else:
            there = keys + ((head - QUERIES) * slots + slot) * WIDTH + at
            inside = inside & stored
        tl.store(there, turned_x, mask=inside)
        tl.store(there + WIDTH // 2, turned_y, mask=inside)


def turn_and_store(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    places: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    where: Mapping[str, torch.Tensor],
    layer: int,
    shape: tuple[int, int, int],
) -> torch.Tensor:
    """Norm and turn queries and keys, and store keys and values: queries [1, Hq, T, d] are returned.

    Args:
        heads: [T, (Hq + 2 Hkv) d] of queries, keys and values, contiguous; or in parts, see
            :func:`specdec.runners.kernels.product.product`.
        cosines, sines: [positions, d] in the model's dtype.
        places: int64 [T], which row of these a row is turned by.
        norms: weights [d] of the norms per query and per key head, and epsilon; or None.
        where: of the rows, see :mod:`specdec.runners.packed_step`: what fills a bucket is not stored.
        layer: whose keys and values they are.
        shape: Hq, Hkv and d.
    """
    query_heads, key_heads, width = shape
    rows = heads.shape[-2]
    query = torch.empty(rows, query_heads, width, dtype=cosines.dtype, device=heads.device)
    query_weight, key_weight, epsilon = (query, query, 0.0) if norms is None else norms
    launch: Any = _turn_and_store[(rows, query_heads + 2 * key_heads)]
    with on_device(heads):
        launch(
            heads, cosines, sines, places, query_weight, key_weight, query, where["counts"], where["table"],
            layer, where["table"].shape[-2], rows // (where["counts"].numel() // 3), epsilon,
            QUERIES=query_heads, KEYS=key_heads, WIDTH=width, HALF=triton.next_power_of_2(width // 2),
            NORMED=norms is not None, PARTS=_parts(heads), PAGE=page_of(where), num_warps=1, **early(heads.device),
        )  # fmt: skip
    return query.transpose(0, 1)[None]


@triton.jit(do_not_specialize=("size",))
def _gate(both, output, size, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_former(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    place = at // INNER * 2 * INNER + at % INNER
    x = tl.load(both + place, mask=inside, other=0.0)
    up = tl.load(both + place + INNER, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    shut = (wide / (1.0 + tl.exp(-wide))).to(x.dtype)
    tl.store(output + at, (shut.to(tl.float32) * up.to(tl.float32)).to(x.dtype), mask=inside)


def gate(both: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of [T, 2 I], contiguous, times the second: [T, I]."""
    rows, inner = both.shape[0], both.shape[1] // 2
    output = both.new_empty(rows, inner)
    launch: Any = _gate[(triton.cdiv(rows * inner, _BLOCK),)]
    with on_device(both):
        launch(both, output, rows * inner, INNER=inner, BLOCK=_BLOCK, **early(both.device))
    return output
