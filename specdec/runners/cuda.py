"""Known layers on a CUDA device: nine launches each, where the products are cuBLAS's and what is between them Triton's.

A layer hands on the residual stream and what is to be added to it, so that the sum is taken with the next norm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from specdec.attention import attend
from specdec.block import Block
from specdec.pages import FilePages
from specdec.runners.known import KnownLayer
from specdec.runners.layers import LayerByLayer, stack_linears

__all__ = ["CudaLayer", "CudaRunner"]


class CudaLayer:
    """A known layer in nine launches; with ``files`` its linears become views of the stacked weights."""

    def __init__(self, layer: KnownLayer, files: FilePages | None, kernels: ModuleType) -> None:
        self._number, self._scale, self._query_heads = layer.number, layer.scale, layer.query_heads
        self._products = stack_linears(layer, files)
        self._norms = [(norm.weight.data, norm.variance_epsilon) for norm in layer.norms]
        self._head_norms = None
        if layer.head_norms:
            query, key = layer.head_norms
            self._head_norms = (query.weight.data, key.weight.data, query.variance_epsilon)
        self._kernels = kernels

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, block: Block, turns: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual [T, D] and what is to be added to it, to the same after the layer.

        ``turns``: cosines and sines [positions, d], and each row's place in them.
        """
        qkv, out, gate_up, down = self._products
        cache, kernels, number = block.cache, self._kernels, self._number
        rows, first = len(residual), block.length + block.first
        residual, normed = kernels.add_norm(residual, delta, *self._norms[0])
        cache.reserve(first + rows)
        query = kernels.turn_and_store(
            F.linear(normed, qkv.weight, qkv.bias), *turns, self._head_norms,
            cache.keys[number], cache.values[number], first, self._query_heads,
        )  # fmt: skip
        mixed = attend(query, block, number, self._scale).transpose(1, 2).reshape(rows, -1)
        residual, normed = kernels.add_norm(residual, F.linear(mixed, out.weight, out.bias), *self._norms[1])
        gated = kernels.gate(F.linear(normed, gate_up.weight, gate_up.bias))
        return residual, F.linear(gated, down.weight, down.bias)


class CudaRunner(LayerByLayer):
    """A loop over such layers; see :class:`LayerByLayer`."""

    def __init__(self, layers: Sequence[CudaLayer], **parts: Any) -> None:
        super().__init__("fused", [], **parts)
        self._known = tuple(layers)

    def run(
        self, hidden: torch.Tensor, block: Block, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        found: dict[int, torch.Tensor] = {}
        delta: torch.Tensor | None = None
        turns = self._rotary.turns(block, hidden)
        for number in range(first, last):
            if number in taps:
                hidden, delta = hidden if delta is None else hidden + delta, None
                found[number] = hidden
            hidden, delta = self._known[number](hidden, delta, block, turns)
        return hidden if delta is None else hidden + delta, found
