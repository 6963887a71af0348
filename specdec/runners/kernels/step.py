"""Attention whose sums are cut at fixed positions of the text, so that a row's bits depend on its own text only.

A token at position n sees the keys at positions up to n, committed or drafted, whatever other rows there are. The
positions are cut into segments (short ones first, so that a long text has few), and each segment's keys are summed in
blocks of 64, in the order of their positions, with a running softmax. Two launches of one compiled kernel do it:

1. A program per segment, group of rows and key head, over the committed keys in whole blocks of 64. All rows see these.
2. A program per row and key head continues with the keys up to the row's own position; it finds drafted keys by the
   row's path through the tree. Then it joins the segments in order.

Keys that the second launch sums in one step are summed by the first in a later step, once they are committed. It
executes the same instructions on the same numbers, as it is the same program, and tensor cores compute every number of
a tile independently.

The keys' number, their addresses and the number of rows are read from the device's memory
(:mod:`specdec.runners.packed_step`), so that one CUDA graph serves all texts. Keys and values lie beside each other, or
in pages of 64 positions (:mod:`specdec.step.pages`). A block of committed keys lies in one page, whose address is read
once; drafted keys may be in several. Padding rows of a bucket see nothing.

The kernels of this folder run on CUDA, and on a CPU under Triton's interpreter (``TRITON_INTERPRET=1``), which is how
the tests check their numbers. ``scripts/compile_kernels.py`` shows without a GPU that they compile for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.launch import after_former, early, on_device
from specdec.step.pages import PAGE

__all__ = ["constants", "page_of", "paths", "segments_of", "step_attention"]

_BLOCK = 128  # rows of a tree that are looked at together
_JOINED = 4096  # numbers of several segments that are joined together
_LEVELS = ((0, 0, 128), (2048, 16, 512), (8192, 28, 2048), (32768, 40, 8192))
"""Where segments of a size begin, the first one's number, and the size: multiples of what is summed at once."""


@triton.jit
def _segment(position):
    """The number of the segment that a position is in; see ``_LEVELS``."""
    near = tl.where(position < 2048, position // 128, 16 + (position - 2048) // 512)
    far = tl.where(position < 32768, 28 + (position - 8192) // 2048, 40 + (position - 32768) // 8192)
    return tl.where(position < 8192, near, far)


@triton.jit
def _start(segment):
    """The first position of a segment."""
    near = tl.where(segment < 16, segment * 128, 2048 + (segment - 16) * 512)
    far = tl.where(segment < 40, 8192 + (segment - 28) * 2048, 32768 + (segment - 40) * 8192)
    return tl.where(segment < 28, near, far)


def segments_of(positions: int) -> int:
    """How many segments a text of so many tokens has at most."""
    first, number, size = next(level for level in reversed(_LEVELS) if level[0] < max(positions, 1))
    return number - (first - max(positions, 1)) // size


@triton.jit(do_not_specialize=("bucket", "reach"))
def _paths(counts, places, closure, output, bucket, reach, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_former(PDL)
    row = tl.program_id(0)
    sequence = row // bucket
    length = tl.load(counts + 3 * sequence)
    for start in range(0, reach, BLOCK):
        above = start + tl.arange(0, BLOCK)
        mine = tl.load(closure + row.to(tl.int64) * reach + above, mask=above < reach, other=0) != 0
        depth = tl.load(places + sequence * reach + above, mask=mine, other=0) - length
        tl.store(output + row.to(tl.int64) * reach + depth, above, mask=mine)


def paths(where: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int32 [T, K]: which row of the tree a row sees at a depth, where it sees one; of a block or a batch."""
    closure = where["closure"]
    bucket, reach = closure.shape[-2:]
    output = torch.zeros(closure.numel() // reach, reach, dtype=torch.int32, device=closure.device)
    launch: Any = _paths[(len(output),)]
    with on_device(closure):
        launch(
            where["counts"], where["places"], closure, output, bucket, reach,
            BLOCK=_BLOCK, num_warps=1, **early(closure.device),
        )  # fmt: skip
    return output


@triton.jit(do_not_specialize=("joins", "layer", "layers", "bucket", "reach", "segments", "scale", "window"))
def _attend(
    query, counts, table, places, paths, tops, totals, mixes, output,
    joins, layer, layers, bucket, reach, segments, scale, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, JOINED: tl.constexpr, WINDOWED: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = ROWS // GROUP  # rows of a program that do not join
    head = tl.program_id(0)
    tiles = tl.where(joins != 0, bucket, tl.cdiv(bucket, EACH))
    sequence, tile = tl.program_id(1) // tiles, tl.program_id(1) % tiles
    lead = tl.where(joins != 0, tile, tile * EACH)
    place = tl.arange(0, ROWS)  # row r of the program, head g of the group: r * GROUP + g
    row, own = lead + place // GROUP, head * GROUP + place % GROUP
    counts += 3 * sequence
    table += (2 if PAGE else 3) * (sequence * layers + layer)
    places += sequence * reach
    first_row = sequence * bucket  # among those of all sequences
    length, before, rows = tl.load(counts).to(tl.int32), tl.load(counts + 1), tl.load(counts + 2)
    live = (place < tl.where(joins != 0, GROUP, EACH * GROUP)) & (row < rows)
    element = query.dtype.element_ty
    if PAGE:
        pages = tl.load(table).to(tl.pointer_type(tl.int64))
        ahead = tl.load(table + 1).to(tl.int32) + head * PAGE * WIDTH  # numbers in a page, before these keys
    else:
        slots = tl.load(table + 2)
        keys = tl.load(table).to(tl.pointer_type(element)) + head * slots * WIDTH
        values = tl.load(table + 1).to(tl.pointer_type(element)) + head * slots * WIDTH
        if WIDTH % 8 == 0:  # else they are read number by number: the compiler knows nothing of an address from memory
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        around = slots.to(tl.int32)
    wide = tl.arange(0, WIDE)
    inside = wide < WIDTH
    index = first_row + row
    stand = tl.load(places + before + row, mask=live, other=0).to(tl.int32)
    last = tl.load(places + before + lead, mask=lead < rows, other=-1).to(tl.int32)  # position of the row that joins
    after_former(PDL)  # all that was read so far has been there since the step began
    if (joins == 0) & (_start(tl.program_id(2)) >= length // KEYS * KEYS):
        return
    q = tl.load(
        query + (index * HEADS + own)[:, None] * WIDTH + wide[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )

    low = length * 0
    if WINDOWED:
        low = tl.maximum(length - window + 1, low)
    chunk = low // KEYS * KEYS
    whole = length // KEYS * KEYS
    if joins != 0:
        number, beyond, end = _segment(whole), _segment(tl.maximum(last, 0)) + 1, last + 1
    else:
        number, beyond, end = tl.program_id(2), tl.program_id(2) + 1, whole
    path = paths + (first_row + lead).to(tl.int64) * reach - length
    factor = scale * 1.4426950408889634
    for segment in range(number, beyond):
        start, stop = tl.maximum(_start(segment), chunk), tl.minimum(_start(segment + 1), end)
        at = index * segments + segment
        goes_on = (joins != 0) & (start < whole) & live
        if joins != 0:
            start = tl.maximum(start, whole)
        top = tl.load(tops + at * HEADS + own, mask=goes_on, other=float("-inf"))
        total = tl.load(totals + at * HEADS + own, mask=goes_on, other=0.0)
        there = (at * HEADS + own)[:, None] * WIDTH + wide[None, :]
        mixed = tl.load(mixes + there, mask=goes_on[:, None] & inside[None, :], other=0.0)
        if PAGE:
            near = tl.load(pages + start // PAGE, mask=start < stop, other=0)
        for first in range(start, stop, KEYS):
            position = first + tl.arange(0, KEYS)
            known = (position >= low) & (position < end)
            drafted = position >= length
            hop = tl.load(path + position, mask=known & drafted, other=0)
            slot = tl.where(drafted, length + hop, position)
            if PAGE:
                page = tl.load(pages + slot // PAGE, mask=known & drafted, other=0)
                page = tl.where(drafted, page, near)
                near = tl.load(pages + (first + KEYS) // PAGE, mask=first + KEYS < stop, other=0)  # ahead of its use
                keys = page.to(tl.pointer_type(element)) + ahead + (slot & (PAGE - 1)) * WIDTH
                values = keys + HEADS // GROUP * PAGE * WIDTH
                if WIDTH % 8 == 0:
                    keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
                key_at, value_at = keys[None, :], values[:, None]
            else:
                key_at, value_at = keys + (slot % around)[None, :] * WIDTH, values + (slot % around)[:, None] * WIDTH
            k = tl.load(key_at + wide[:, None], mask=known[None, :] & inside[:, None], other=0.0)
            seen = live[:, None] & known[None, :]
            if WINDOWED:
                seen = seen & (position[None, :] > (stand - window)[:, None])
            scores = tl.where(seen, tl.dot(q, k, input_precision="ieee"), float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            # A row that has seen nothing yet has no maximum to subtract.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            share = tl.exp2((scores - level[:, None]) * factor)
            shrink = tl.exp2((top - level) * factor)
            v = tl.load(value_at + wide[None, :], mask=known[:, None] & inside[None, :], other=0.0)
            mixed = tl.dot(share.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
            total = total * shrink + tl.sum(share, 1)
            top = higher
        holds = live & (start < stop)
        tl.store(tops + at * HEADS + own, top, mask=holds)
        tl.store(totals + at * HEADS + own, total, mask=holds)
        tl.store(mixes + there, mixed, mask=holds[:, None] & inside[None, :])

    if joins != 0:
        tl.debug_barrier()  # its own segments are read again, by other threads
        GROUPS: tl.constexpr = triton.next_power_of_2(GROUP)
        one = tl.arange(0, GROUPS)
        mine = head * GROUP + one
        all_top = tl.full([GROUPS], float("-inf"), tl.float32)
        all_total = tl.zeros([GROUPS], tl.float32)
        all_mixed = tl.zeros([GROUPS, WIDE], tl.float32)
        oldest = low * 0
        if WINDOWED:
            oldest = _segment(tl.maximum(last - window + 1, low))
        for block in range(oldest // JOINED * JOINED, tl.where(lead < rows, beyond, 0), JOINED):
            several = block + tl.arange(0, JOINED)
            part = ((first_row + lead) * segments + several)[None, :] * HEADS + mine[:, None]
            holds = ((several >= oldest) & (several < beyond))[None, :] & (one < GROUP)[:, None]
            part_top = tl.load(tops + part, mask=holds, other=float("-inf"))
            part_total = tl.load(totals + part, mask=holds, other=0.0)
            part_mixed = tl.load(
                mixes + part[:, :, None] * WIDTH + wide[None, None, :],
                mask=holds[:, :, None] & inside[None, None, :],
                other=0.0,
            )
            higher = tl.maximum(all_top, tl.max(part_top, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2((part_top - level[:, None]) * factor)
            shrink = tl.exp2((all_top - level) * factor)
            all_total = all_total * shrink + tl.sum(part_total * weight, 1)
            all_mixed = all_mixed * shrink[:, None] + tl.sum(part_mixed * weight[:, :, None], 1)
            all_top = higher
        result = all_mixed / tl.where(all_total == 0.0, 1.0, all_total)[:, None]
        tl.store(
            output + ((first_row + lead) * HEADS + mine)[:, None] * WIDTH + wide[None, :],
            result.to(element),
            mask=(one < GROUP)[:, None] & inside[None, :],
        )


@cache
def constants(heads: int, group: int, width: int, itemsize: int, *, windowed: bool, page: int) -> dict[str, Any]:
    """What the kernel is compiled for; nothing of it depends on the number of rows, so that one does for all.

    ``page``: see :func:`page_of`.
    """
    wide = max(16, triton.next_power_of_2(width))
    small = wide * itemsize > 256  # with more, a block of a smaller GPU has no room for it
    full = itemsize > 2  # multiplied without tensor cores, from registers
    groups = triton.next_power_of_2(group)
    return {
        "GROUP": group, "HEADS": heads, "WIDTH": width, "WIDE": wide, "ROWS": max(16 if small or full else 32, groups),
        "KEYS": 16 if full else 32 if small else 64, "JOINED": min(16, max(1, _JOINED // (groups * wide))),
        "WINDOWED": windowed, "PAGE": page, "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def page_of(where: Mapping[str, torch.Tensor]) -> int:
    """Positions of a page of the caches of a block or a batch; 0 where their slots lie beside each other."""
    return PAGE if where["table"].shape[-1] == 2 else 0


def step_attention(
    query: torch.Tensor,
    where: Mapping[str, torch.Tensor],
    layer: int,
    key_heads: int,
    window: int | None,
    scale: float,
    segments: int,
) -> torch.Tensor:
    """[T, Hq d] in the query's dtype; zeros for rows that only fill a bucket.

    Args:
        query: [1, Hq, T, d] as :func:`specdec.runners.kernels.layer.turn_and_store` gives it, T a bucket.
        where: of the rows, see :mod:`specdec.runners.packed_step`, with its ``paths``; their keys are in
            their slots.
        layer, key_heads, window: of whose keys and values there are.
        segments: that a text has at most, see :func:`segments_of`.
    """
    _, heads, rows, width = query.shape
    sequences, group = where["counts"].numel() // 3, heads // key_heads
    each, reach = rows // sequences, where["paths"].shape[-1]
    fixed = constants(heads, group, width, query.element_size(), windowed=window is not None, page=page_of(where))
    device = query.device
    tops, totals = torch.empty(2, rows, segments, heads, dtype=torch.float32, device=device)
    mixes = torch.empty(rows, segments, heads, width, dtype=torch.float32, device=device)
    output = torch.empty(rows, heads * width, dtype=query.dtype, device=device)
    tiles = sequences * triton.cdiv(each, fixed["ROWS"] // group)
    with on_device(query):
        for joins, grid in ((0, (key_heads, tiles, segments)), (1, (key_heads, rows, 1))):
            launch: Any = _attend[grid]
            launch(
                query, where["counts"], where["table"], where["places"], where["paths"], tops, totals, mixes, output,
                joins, layer, where["table"].shape[-2], each, reach, segments, scale, window or 0,
                **fixed, **early(device),
            )  # fmt: skip
    return output
