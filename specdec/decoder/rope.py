"""Rotary positions: tables of cosines and sines, in float32 as transformers computes them.

A position is the same in every text, as contexts end where frequencies would begin to depend on the length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specdec.decoder.rope_scaling import Dynamic, Linear, Llama3, LongRope, Yarn
from specdec.decoder.spec import Growth, Rope
from specdec.runners.rows import Rows

__all__ = ["Angles", "RopeTables", "frequencies", "grown", "rotate", "signed"]

_START = 1024  # positions of a table at first


class Angles(NamedTuple):
    """Rotary positions [..., dim]: cosines, and sines with their first half negated."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


def rotate(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Heads [..., T, d] at positions [T, dim]: halves swapped is a roll, with the sign moved into the sines.

    Values of a head behind the first ``dim`` stay as they are.
    """
    if (dim := angles.cos.shape[-1]) < heads.shape[-1]:
        if not dim:
            return heads
        return torch.cat((rotate(heads[..., :dim], angles), heads[..., dim:]), -1)
    return torch.addcmul(heads * angles.cos, heads.roll(heads.shape[-1] // 2, -1), angles.signed_sin)


def grown(growth: Growth, positions: torch.Tensor) -> torch.Tensor:
    """[T] float32: what queries at these positions are multiplied by."""
    return 1 + growth.by * torch.log(1 + torch.floor(positions.float() / growth.every))


def signed(sin: torch.Tensor) -> torch.Tensor:
    """Sines [..., dim] with their first half negated."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


def frequencies(rope: Rope) -> tuple[torch.Tensor, float]:
    """How far each pair of values turns from one position to the next, [dim / 2] float32 in radians, and what cosines
    and sines are multiplied by.
    """
    scaling, base, dim = rope.scaling, rope.base, rope.dim
    if isinstance(scaling, Dynamic):  # as at its own length; what should be 1 is so but for rounding
        grown = scaling.factor * scaling.trained / scaling.trained - (scaling.factor - 1)
        base = base * grown ** (dim / (dim - 2))
    turns = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # positions in a radian
    if isinstance(scaling, LongRope):
        return 1.0 / (torch.tensor(scaling.factors, dtype=torch.float32) * turns), scaling.attention
    plain = 1.0 / turns
    if isinstance(scaling, Linear):
        return plain / scaling.factor, 1.0
    if isinstance(scaling, Llama3):
        return _llama3(plain, scaling), 1.0
    if isinstance(scaling, Yarn):
        return _yarn(turns, rope, scaling), scaling.attention
    return plain, 1.0


def _llama3(plain: torch.Tensor, scaling: Llama3) -> torch.Tensor:
    """Between low and high the two are mixed by how often a frequency turns in what was trained."""
    length = 2 * math.pi / plain  # positions of a turn
    short, long = scaling.trained / scaling.high, scaling.trained / scaling.low
    share = (scaling.trained / length - scaling.low) / (scaling.high - scaling.low)
    mixed = (1 - share) * plain / scaling.factor + share * plain
    found = torch.where(length > long, plain / scaling.factor, plain)
    return torch.where((length < short) | (length > long), found, mixed)


def _yarn(turns: torch.Tensor, rope: Rope, scaling: Yarn) -> torch.Tensor:
    """Between ``fast`` and ``slow`` the two are mixed by the place of a frequency."""

    def place(count: float) -> float:
        """Where a frequency would be that turns so often in what was trained."""
        return (rope.dim * math.log(scaling.trained / (count * 2 * math.pi))) / (2 * math.log(rope.base))

    low, high = place(scaling.fast), place(scaling.slow)
    if scaling.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high += 0.001 if low == high else 0
    ramp = torch.clamp((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * turns) * (1 - kept) + 1.0 / turns * kept


class RopeTables:
    """Tables of rotary positions 0, 1, 2, ... in a dtype and on a device, as long as they were asked for."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._tables = dict[Rope, Angles]()

    def whole(self, rope: Rope, end: int) -> Angles:
        """[positions, dim] of positions 0 to ``end`` - 1 or more."""
        table = self._tables.get(rope)
        if table is None or len(table.cos) < end:
            table = self._tables[rope] = self._made(rope, max(_START, 1 << end.bit_length()))
        return table

    def of(self, rope: Rope, rows: Rows) -> Angles:
        """[T, dim] of a forward's rows."""
        table = self.whole(rope, rows.end)
        if rows.start is not None:
            return Angles(*(values.narrow(0, rows.start, rows.rows) for values in table))
        places = rows.positions[0].to(table.cos.device)
        return Angles(*(values.index_select(0, places) for values in table))

    def _made(self, rope: Rope, size: int) -> Angles:
        each, attention = frequencies(rope)
        turned = torch.arange(size, dtype=torch.int64)[:, None].float() * each
        turned = torch.cat((turned, turned), -1).to(self._device)
        cos, sin = (values.mul(attention).to(self._dtype) for values in (turned.cos(), turned.sin()))
        return Angles(cos, signed(sin))
