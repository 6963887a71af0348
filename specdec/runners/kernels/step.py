"""Attention of a step whose every number is read from the device's memory, so that a CUDA graph of it holds for all.

Committed tokens and the tree are one list of keys: row i sees those before the tree, within its window, and of the tree
what a bit says. The list is cut into a few parts, one program each (flash decoding), and each says the log-sum-exp of
its scores, by which a second launch joins them: exact, whatever the cut. Which keys there are, where they lie in memory
and how many rows count comes from the block (:class:`specdec.step.block.Block`). Rows that fill a bucket see nothing.

Tested as :mod:`specdec.runners.kernels.tree` is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.tree import on_device

__all__ = ["constants", "step_attention"]

_KEYS = 32  # per turn
_PROGRAMS = 256  # about as many as run at once on two for each of an H100's 132 processors
_MOST_PARTS = 32


@triton.jit(do_not_specialize=("layer", "layers", "bucket", "reach", "scale", "window"))
def _part(
    query, counts, table, places, closure, mixed_parts, weight_parts,
    layer, layers, bucket, reach, scale, window,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(2)
    heads = tl.num_programs(0) * GROUP
    tiles = tl.cdiv(bucket * GROUP, ROWS)
    sequence, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    place = tile * ROWS + tl.arange(0, ROWS)  # row r of the sequence, head g of the group: r * GROUP + g
    row, own = place // GROUP, head * GROUP + place % GROUP
    counts += 3 * sequence
    table += 3 * (sequence * layers + layer)
    places += sequence * reach
    closure += sequence * bucket * reach
    before_it, of_all = sequence * bucket, tl.num_programs(1) // tiles * bucket  # rows
    length, before, rows = tl.load(counts), tl.load(counts + 1), tl.load(counts + 2)
    live = row < rows
    element = query.dtype.element_ty
    slots = tl.load(table + 2)
    keys = tl.load(table).to(tl.pointer_type(element)) + head * slots * WIDTH
    values = tl.load(table + 1).to(tl.pointer_type(element)) + head * slots * WIDTH
    if WIDTH % 8 == 0:  # else they are read number by number: the compiler knows nothing of an address from memory
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
    wide = tl.arange(0, WIDE)
    inside = wide < WIDTH
    q = tl.load(
        query + ((before_it + row) * heads + own)[:, None] * WIDTH + wide[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    stand = tl.load(places + before + row, mask=live, other=0)

    low = length * 0
    if WINDOWED:
        low = tl.maximum(length - window + 1, low)
    end = length + before + rows
    each = tl.cdiv(tl.cdiv(end - low, PARTS), KEYS) * KEYS
    low += part * each
    end = tl.minimum(end, low + each)
    first = low % slots  # what is seen goes round a ring once at most, and a remainder per key would take long

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(low, end, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < end
        drafted = key >= length
        slot = first + key - low
        slot = tl.where(slot < slots, slot, slot - slots)
        k = tl.load(keys + slot[None, :] * WIDTH + wide[:, None], mask=known[None, :] & inside[:, None], other=0.0)
        at = row[:, None] * reach + (key - length)[None, :]
        mine = tl.load(closure + at, mask=live[:, None] & (known & drafted)[None, :], other=0) != 0
        seen = live[:, None] & known[None, :] & (mine | (key < length)[None, :])
        if WINDOWED:
            other = tl.where(drafted, tl.load(places + key - length, mask=known & drafted, other=0), key)
            seen = seen & (stand[:, None] - other[None, :] < window)
        scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum to subtract.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(scores - level[:, None])
        shrink = tl.exp(top - level)
        v = tl.load(values + slot[:, None] * WIDTH + wide[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(share, 1)
        top = higher

    there = (part * of_all + before_it + row) * heads + own
    fits = row < bucket
    some = tl.where(total == 0.0, 1.0, total)
    tl.store(weight_parts + there, top + tl.log(some), mask=fits)
    tl.store(
        mixed_parts + there[:, None] * WIDTH + wide[None, :],
        mixed / some[:, None],
        mask=fits[:, None] & inside[None, :],
    )


@triton.jit
def _join(mixed_parts, weight_parts, output, WIDTH: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    one, all_of_them = tl.program_id(0), tl.num_programs(0)  # a head of a row
    there = tl.arange(0, PARTS) * all_of_them + one
    wide = tl.arange(0, WIDE)
    weight = tl.load(weight_parts + there)
    top = tl.max(weight, 0)
    share = tl.exp(weight - tl.where(top == float("-inf"), 0.0, top))
    at = there[:, None] * WIDTH + wide[None, :]
    mixed = tl.load(mixed_parts + at, mask=(share > 0.0)[:, None] & (wide < WIDTH)[None, :], other=0.0)
    total = tl.sum(share, 0)
    result = tl.sum(mixed * share[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + one * WIDTH + wide, result.to(output.dtype.element_ty), mask=wide < WIDTH)


def constants(
    sequences: int, rows: int, heads: int, group: int, width: int, itemsize: int, *, windowed: bool
) -> dict[str, Any]:
    """What the first kernel is compiled for: sequences with a bucket of rows each, and heads of keys."""
    wide = max(16, triton.next_power_of_2(width))
    most = 64 if wide * itemsize <= 256 else 16  # with more, a block of a smaller GPU has no room for it
    tile = min(most, max(16, triton.next_power_of_2(rows * group)))
    parts = _PROGRAMS // (sequences * heads * triton.cdiv(rows * group, tile))
    return {
        "GROUP": group, "WIDTH": width, "WIDE": wide, "ROWS": tile, "KEYS": _KEYS,
        "PARTS": 1 << min(max(1, parts), _MOST_PARTS).bit_length() - 1,
        "WINDOWED": windowed,
    }  # fmt: skip


def step_attention(
    query: torch.Tensor,
    where: Mapping[str, torch.Tensor],
    layer: int,
    key_heads: int,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """[T, Hq d] in the query's dtype; zeros for rows that only fill a bucket.

    Args:
        query: [1, Hq, T, d] as :func:`specdec.runners.kernels.layer.turn_and_store` gives it, T a bucket.
        where: of rows that come again, see :class:`specdec.step.block.Block` and ``Batch``; they are in their slots.
        layer, key_heads, window: of whose keys and values there are.
    """
    _, heads, rows, width = query.shape
    sequences, group, itemsize = where["counts"].numel() // 3, heads // key_heads, query.element_size()
    each, reach = where["closure"].shape[-2:]
    fixed = constants(sequences, each, key_heads, group, width, itemsize, windowed=window is not None)
    parts = fixed["PARTS"]
    mixed = torch.empty(parts, rows, heads, width, dtype=torch.float32, device=query.device)
    weights = torch.empty(parts, rows, heads, dtype=torch.float32, device=query.device)
    output = torch.empty(rows, heads * width, dtype=query.dtype, device=query.device)
    first: Any = _part[(key_heads, sequences * triton.cdiv(each * group, fixed["ROWS"]), parts)]
    second: Any = _join[(rows * heads,)]
    with on_device(query):
        first(
            query, where["counts"], where["table"], where["places"], where["closure"], mixed, weights,
            layer, where["table"].shape[-2], each, reach, scale, window or 0, **fixed,
        )  # fmt: skip
        second(mixed, weights, output, WIDTH=width, WIDE=fixed["WIDE"], PARTS=parts)
    return output
