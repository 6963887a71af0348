"""Shares: a forward's least time by the limits of this machine's cores, as a share of the time that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.costs.curve import CostCurve
from specdec.execute.native import NativeExecutor
from specdec.native.limits import Limits, measure
from specdec.native.types import Kind
from specdec.target import Target

__all__ = ["Shares", "shares"]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """A curve against the limits of the cores that it was measured on.

    Attributes:
        limits: what the cores do.
        multiplied: by what products were taken to multiply; None for integers, whose limit is not measured.
        of: ``of[i][j]`` is the least time of ``curve.rows[j]`` rows after ``curve.lengths[i]`` tokens, over its time.
    """

    limits: Limits
    multiplied: str | None
    of: Sequence[Sequence[float]]

    def describe(self) -> str:
        """The limits, and what a share above 1 means where there is one."""
        text = f"limits: {self.limits.reading / 1e9:.1f} GB/s of reading"
        if self.multiplied:
            text += f", {self.limits.multiplying / 1e9:.0f} GFLOP/s of multiplying ({self.multiplied})"
        highest = max(max(row) for row in self.of)
        if highest > 1:
            text += (
                f". The highest share is {highest:.2f}, above 1: weights stay in a cache from forward to forward, or "
                "other work ran while the limits were measured"
            )
        return text


def shares(curve: CostCurve, target: Target) -> Shares | None:
    """Measure the limits and set a curve of this target against them; None where its runner has none.

    A forward's least time is that of its products, which read each weight once and multiply it with every row, plus
    that of attention, which does so with each layer's keys and values. Each takes as long as the slower of reading and
    multiplying.
    """
    executor, specs = target.executor, target.specs
    if not isinstance(executor, NativeExecutor) or (weights := executor.weights) is None:
        return None
    kind, tiles = Kind(weights[0].described.kind), bool(weights[0].described.tiles)
    limits = measure(kind, tiles=tiles, threads=torch.get_num_threads())
    in_integers = any(weight.described.kind >= Kind.QUANTISED for weight in weights)
    read = sum(weight.nbytes for weight in weights)
    multiplied = sum(weight.inputs * weight.outputs for weight in weights)
    passes = 3 if tiles and kind is Kind.CODED else 1  # a float32 row goes by tiles as three rows

    def least(rows: int, length: int) -> float:
        seen = [length if spec.window is None else min(length, spec.window) for spec in specs]
        cached = sum(spec.slot_bytes * count for spec, count in zip(specs, seen, strict=True))
        scored = sum(
            layer.attention.heads * (spec.key_dim + spec.value_dim) * count
            for layer, spec, count in zip(executor.spec.layers, specs, seen, strict=True)
        )
        by_products = 0.0 if in_integers else 2 * multiplied * rows * passes / limits.multiplying
        by_attention = 2 * scored * rows / limits.multiplying
        seconds: float = max(read / limits.reading, by_products) + max(cached / limits.reading, by_attention)
        return seconds

    of = [
        [least(rows, length) / seconds for rows, seconds in zip(curve.rows, times, strict=True)]
        for length, times in zip(curve.lengths, curve.seconds, strict=True)
    ]
    return Shares(limits=limits, multiplied=None if in_integers else _named(kind, tiles), of=of)


def _named(kind: Kind, tiles: bool) -> str:
    if tiles:
        return "by tiles of bfloat16"
    return "pairs of bfloat16" if kind in (Kind.PAIRS, Kind.CODED_PAIRS) else "float32"
