"""The end of a recorded step, in Triton: each row's argmax, and the target's draw, from its logits, in two launches.

A draw is the argmax of logits over the temperature plus noise, which is a function of the text's seed, the position
and the token (:mod:`specdec.sampling.noise`). Of two tokens with the same number the first is taken, as torch does.
Seed and temperature are read from memory, so that one graph serves sampled texts and greedy ones, whose draws are left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.runners.kernels.launch import after_former, early, on_device

__all__ = ["pick"]

_PART = 2048  # tokens of a program


@triton.jit
def _hashed(x):
    """SplitMix64's hash of uint64 numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _pick(
    logits, draws, counts, places, best, best_at, drawn, drawn_at,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence = row // ROWS
    start = tl.load(draws + 2 * sequence)
    scale = tl.load(draws + 2 * sequence + 1).to(tl.int32).to(tl.float32, bitcast=True)
    place = tl.minimum(tl.load(counts + 3 * sequence + 1) + row % ROWS, PLACES - 1)
    position = tl.load(places + sequence * PLACES + place) + 1
    token = part * PART + tl.arange(0, PART)
    inside = token < TOKENS
    after_former(PDL)
    x = tl.load(logits + row.to(tl.int64) * TOKENS + token, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # not a number, and infinite, are both no distribution
    value, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    there = row * parts + part
    tl.store(best + there, value)
    tl.store(best_at + there, part * PART + at)
    if scale != 0.0:
        golden = 0x9E3779B97F4A7C15
        key = _hashed(_hashed(position.to(tl.uint64) * golden + start.to(tl.uint64, bitcast=True)))
        number = _hashed((token.to(tl.uint64) + 1) * golden + key) >> 11
        noise = -tl.log(-tl.log((number.to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16))
        total = (x * scale).to(tl.float64) + noise
        most, where = tl.max(total, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(drawn + there, most)
        tl.store(drawn_at + there, part * PART + where)


@triton.jit
def _join(
    draws, best, best_at, drawn, drawn_at, picked,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    part = tl.arange(0, WIDE)
    inside = part < PARTS
    scale = tl.load(draws + 2 * (row // ROWS) + 1)
    after_former(PDL)
    there = row * PARTS
    x = tl.load(best + there + part, mask=inside, other=float("-inf"))
    value, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_at + there + at).to(tl.int64)
    own = tl.where(tl.abs(value) < float("inf"), token, -1)
    tl.store(picked + 5 * row, own)
    drawn_token = own * 0 - 1
    if scale != 0:
        y = tl.load(drawn + there + part, mask=inside, other=float("-inf"))
        most, where = tl.max(y, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(drawn_at + there + where).to(tl.int64)
        drawn_token = tl.where(tl.abs(most) < float("inf"), token, -1)
        own = drawn_token
    tl.store(picked + 5 * row + 1, drawn_token)
    if ROWS == 1:  # of a root alone there is nothing to walk
        tl.store(picked + 5 * row + 2, 0)
        tl.store(picked + 5 * row + 3, 0)
        tl.store(picked + 5 * row + 4, own)


def pick(logits: torch.Tensor, where: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int64 [B, 5]: the argmax of each row of ``logits`` [B, V], the target's draw after it, and of its sequence the
    last row that is accepted, its depth, and the target's token after that.

    A row whose logits are no distribution has -1, and so has the draw of a text that is not sampled. The last three
    are :func:`specdec.runners.kernels.walk.walk`'s, where a sequence has more than one row.

    Args:
        where: a block's ``step``, of one sequence or several with B rows in all; ``draws`` among its arrays.
    """
    rows, tokens = logits.shape
    draws, counts, places = where["draws"], where["counts"], where["places"]
    parts = triton.cdiv(tokens, _PART)
    best, drawn = (logits.new_empty(rows, parts, dtype=dtype) for dtype in (torch.float32, torch.float64))
    best_at, drawn_at = (logits.new_empty(rows, parts, dtype=torch.int32) for _ in range(2))
    picked = logits.new_empty(rows, 5, dtype=torch.int64)
    shape: dict[str, Any] = {"ROWS": rows // (draws.numel() // 2), **early(logits.device)}
    with on_device(logits):
        _pick[(rows, parts)](
            logits.contiguous(), draws, counts, places, best, best_at, drawn, drawn_at,
            TOKENS=tokens, PLACES=places.shape[-1], PART=_PART, num_warps=4, **shape,
        )  # fmt: skip
        _join[(rows,)](
            draws, best, best_at, drawn, drawn_at, picked,
            PARTS=parts, WIDE=triton.next_power_of_2(parts), num_warps=1, **shape,
        )  # fmt: skip
    return picked
