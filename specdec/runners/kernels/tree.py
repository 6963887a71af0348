"""Attention over a step's tree in Triton, going on from where attention over the prefix ended.

The tree is some hundred keys at most, of which each row sees its ancestors. A flash kernel takes no such mask, and the
masked kernels of torch would read the whole prefix for it; so the prefix goes through flash, and this kernel takes the
log-sum-exp that it returned as the start of its own running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867):
maximum l, sum 1, output o is the state in which flash left off. One launch, no merge afterwards.

Rows are a group's query heads times the tree's rows, so that keys are read once per group. Compiled once per dtype,
head width and kind of tail: no number that changes from step to step is specialised on. Runs on CUDA, and on a CPU
under Triton's interpreter (``TRITON_INTERPRET=1``), which is how the tests check its numbers; that it compiles for GPUs
is shown by ``scripts/compile_kernels.py``, which needs none.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.launch import on_device

__all__ = ["constants", "tree_attention"]

_ROWS, _KEYS = 16, 32  # per program and per turn; the least that tensor cores take, as trees are small
_CHANGING = ("rows", "size", "first", "scale", "query_head", "query_row", "key_head", "value_head", "mask_row",
             "prior_head", "prior_row")  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING)
def _tree(
    query, keys, values, mask, slots, prior, prior_weight, output,
    rows, size, first, scale, query_head, query_row, key_head, value_head, mask_row, prior_head, prior_row,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, INDEXED: tl.constexpr, CONTINUED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # times a head's slots, which may be more than 32 bits count
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # row r of the tree, head g of the group: r * GROUP + g
    row, own = place // GROUP, head * GROUP + place % GROUP
    live = row < rows
    wide, value_wide = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    inside, value_inside = wide < WIDTH, value_wide < VALUE_WIDTH

    own_query = query + own[:, None] * query_head + row[:, None] * query_row + wide[None, :]
    q = tl.load(own_query, mask=live[:, None] & inside[None, :], other=0.0)
    if CONTINUED:
        top = tl.load(prior_weight + own * rows + row, mask=live, other=0.0)
        total = tl.full([ROWS], 1.0, tl.float32)
        own_prior = prior + own[:, None] * prior_head + row[:, None] * prior_row + value_wide[None, :]
        mixed = tl.load(own_prior, mask=live[:, None] & value_inside[None, :], other=0.0).to(tl.float32)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, VALUE_WIDE], tl.float32)

    seen = size
    if not MASKED:  # no row of this program sees a key beyond the last of them
        seen = tl.minimum(size, (tl.program_id(1) * ROWS + ROWS - 1) // GROUP + 1)
    for start in range(0, seen, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < size
        if INDEXED:
            slot = tl.load(slots + key, mask=known, other=0)
        else:
            slot = (first + key).to(tl.int64)
        key_at = keys + head * key_head + slot[None, :] * WIDTH + wide[:, None]
        k = tl.load(key_at, mask=known[None, :] & inside[:, None], other=0.0)  # [WIDE, KEYS]
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if MASKED:
            mask_at = mask + row[:, None] * mask_row + key[None, :]
            scores += tl.load(mask_at, mask=live[:, None] & known[None, :], other=float("-inf")).to(tl.float32)
        else:
            scores = tl.where(known[None, :] & (key[None, :] <= row[:, None]), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum to subtract.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(scores - level[:, None])
        shrink = tl.exp(top - level)
        value_at = values + head * value_head + slot[:, None] * VALUE_WIDTH + value_wide[None, :]
        v = tl.load(value_at, mask=known[:, None] & value_inside[None, :], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(share, 1)
        top = higher

    own_output = output + (own[:, None] * rows + row[:, None]) * VALUE_WIDTH + value_wide[None, :]
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(own_output, result.to(output.dtype.element_ty), mask=live[:, None] & value_inside[None, :])


def constants(
    group: int, width: int, value_width: int, *, masked: bool, indexed: bool, continued: bool
) -> dict[str, Any]:
    """What the kernel is compiled for: ``group`` query heads per key head of ``width``, and what it is given."""
    return {
        "GROUP": group, "WIDTH": width, "VALUE_WIDTH": value_width,
        "WIDE": max(16, triton.next_power_of_2(width)), "VALUE_WIDE": max(16, triton.next_power_of_2(value_width)),
        "ROWS": _ROWS, "KEYS": _KEYS, "MASKED": masked, "INDEXED": indexed, "CONTINUED": continued,
    }  # fmt: skip


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tail: tuple[int, int] | torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    prior: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[1, Hq, T, Dv] in the query's dtype.

    Args:
        query: [1, Hq, T, D].
        keys, values: [1, Hkv, slots, D or Dv], all of a layer's; slots are D or Dv numbers apart.
        tail: the slots to attend over, a range or int64 indices [S]: nothing is gathered.
        mask: [T, S] additive; None where row i sees the tail's first i + 1 keys.
        prior: output [1, Hq, T, Dv] and log-sum-exp [1, Hq, T] over other keys, to go on from.
    """
    _, query_heads, rows, width = query.shape
    heads, value_width = keys.shape[1], values.shape[-1]
    indexed = isinstance(tail, torch.Tensor)
    first, size = (0, len(tail)) if isinstance(tail, torch.Tensor) else (tail[0], tail[1] - tail[0])
    if query.stride(-1) != 1:
        query = query.contiguous()
    output = torch.empty(1, query_heads, rows, value_width, dtype=query.dtype, device=query.device)
    before, weight = (query, query) if prior is None else (prior[0], prior[1].float().contiguous())
    if before.stride(-1) != 1:
        before = before.contiguous()
    group = query_heads // heads
    grid = (heads, triton.cdiv(rows * group, _ROWS))
    launch: Any = _tree[grid]
    with on_device(query):
        launch(
            query, keys, values, query if mask is None else mask, tail if indexed else query, before, weight, output,
            rows, size, first, scale, query.stride(1), query.stride(2), keys.stride(1), values.stride(1),
            0 if mask is None else mask.stride(0), before.stride(1), before.stride(2),
            **constants(
                group, width, value_width, masked=mask is not None, indexed=indexed, continued=prior is not None
            ),
        )  # fmt: skip
    return output
