"""Shares: a forward's least time by the limits of this machine's cores, as a share of the time that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec.costs.curve import CostCurve
from specdec.execute.native import NativeExecutor
from specdec.native.limits import Arithmetic, Limits, measure
from specdec.native.types import Kind
from specdec.target import Target

__all__ = ["Shares", "shares"]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A curve against the limits of the cores that it was measured on.

    Attributes:
        limits: what the cores do.
        multiplied: what products multiply.
        of: ``of[i][j]`` is the least time of ``curve.rows[j]`` rows after ``curve.lengths[i]`` tokens, over its time.
    """

    limits: Limits
    multiplied: Sequence[Arithmetic]
    of: Sequence[Sequence[float]]

    def describe(self) -> str:
        """The limits, and what a share above 1 means where there is one."""
        text = f"limits: {self.limits.reading / 1e9:.1f} GB/s of reading"
        for one in self.multiplied:
            text += f", {self.limits.multiplying[one] / 1e9:.0f} {one.unit} of multiplying ({one})"
        highest = max(max(row) for row in self.of)
        if highest > 1:
            text += (
                f". The highest share is {highest:.2f}, above 1: weights stay in a cache from forward to forward, or "
                "other work ran while the limits were measured"
            )
        return text


def shares(curve: CostCurve, target: Target, *, reading: float = 0.0) -> Shares | None:
    """Measure the limits and set a curve of this target against them; None where its runner has none.

    A forward's least time is that of its products, each of which reads a weight once and multiplies it with every row,
    plus that of attention, which does so with each layer's keys and values. Each takes as long as the slower of reading
    and multiplying. ``reading``, in bytes a second, was measured before the curve, and counts where it was faster.
    """
    executor, specs = target.executor, target.specs
    if not isinstance(executor, NativeExecutor) or (weights := executor.weights) is None:
        return None
    products = [
        (weight, Arithmetic.of(Kind(weight.described.kind), tiles=bool(weight.described.tiles))) for weight in weights
    ]
    attends = Arithmetic.of_attention(specs[0].key_dim, half=target.dtype == torch.bfloat16)
    multiplied = list(dict.fromkeys(one for _, one in products))
    limits = measure({*multiplied, attends}, torch.get_num_threads())
    limits = replace(limits, reading=max(limits.reading, reading))

    def least(rows: int, length: int) -> float:
        seen = [length if spec.window is None else min(length, spec.window) for spec in specs]
        cached = sum(spec.slot_bytes * count for spec, count in zip(specs, seen, strict=True))
        scored = sum(
            layer.attention.heads * (spec.key_dim + spec.value_dim) * count
            for layer, spec, count in zip(executor.spec.layers, specs, seen, strict=True)
        )
        seconds = max(cached / limits.reading, 2 * scored * rows / limits.multiplying[attends])
        for weight, by in products:
            in_parts = by is Arithmetic.TILES and weight.described.kind == Kind.CODED  # of a float32 row three rows
            operations = 2 * weight.inputs * weight.outputs * rows * (3 if in_parts else 1)
            seconds += max(weight.nbytes / limits.reading, operations / limits.multiplying[by])
        return seconds

    of = [
        [least(rows, length) / seconds for rows, seconds in zip(curve.rows, times, strict=True)]
        for length, times in zip(curve.lengths, curve.seconds, strict=True)
    ]
    return Shares(limits=limits, multiplied=multiplied, of=of)
