"""Known layers on a CUDA device: nine launches each, where the products are cuBLAS's and what is between them Triton's.

Steps are recorded as CUDA graphs (:mod:`specdec.runners.graphs`); chunks of a prompt and rows of several sequences are
launched kernel by kernel. A layer hands on the residual stream and what is to be added to it, so that the sum is taken
with the next norm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from specdec.runners.attention import attend
from specdec.runners.graphs import CosSin, Recorder, StepGraphs, StepInputs
from specdec.runners.known_layers import KnownLayer
from specdec.runners.layers import LayerByLayer, stack_linears
from specdec.runners.memory_pages import FilePages
from specdec.step.block import Block, Rows

__all__ = ["CudaLayer", "CudaRunner"]


class CudaLayer:
    """A known layer in nine launches; with ``files`` its linears become views of the stacked weights."""

    def __init__(self, layer: KnownLayer, files: FilePages | None, kernels: ModuleType) -> None:
        self._number, self._scale = layer.number, layer.scale
        self._shape = layer.query_heads, layer.key_heads, layer.head_dim
        self._products = stack_linears(layer, files)
        self._norms = [(norm.weight.data, norm.variance_epsilon) for norm in layer.norms]
        self._head_norms = None
        if layer.head_norms:
            query, key = layer.head_norms
            self._head_norms = (query.weight.data, key.weight.data, query.variance_epsilon)
        self._kernels = kernels

    def __call__(
        self, residual: torch.Tensor, delta: torch.Tensor | None, block: Rows | StepInputs, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual [T, D] and what is to be added to it, to the same after the layer.

        ``cos_sin``: cosines and sines [positions, d], and each row's place in them.
        """
        qkv, out, gate_up, down = self._products
        kernels, (cos, sin, at) = self._kernels, cos_sin
        residual, normed = kernels.add_norm(residual, delta, *self._norms[0])
        heads = F.linear(normed, qkv.weight, qkv.bias)
        # Each sequence's rows are stored in its own cache, so that a batch takes two launches more for each of them.
        parts = [self._attend(heads[first:last], part, cos, sin, at[first:last]) for part, first, last in block.parts]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        residual, normed = kernels.add_norm(residual, F.linear(mixed, out.weight, out.bias), *self._norms[1])
        gated = kernels.gate(F.linear(normed, gate_up.weight, gate_up.bias))
        return residual, F.linear(gated, down.weight, down.bias)

    def _attend(
        self, heads: torch.Tensor, block: Block | StepInputs, cos: torch.Tensor, sin: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """One sequence's rows [T, heads x d] to what they attend to, [T, query heads x d]."""
        number, where = self._number, block.where()
        query = self._kernels.turn_and_store(heads, cos, sin, at, self._head_norms, where, number, self._shape)
        if isinstance(block, StepInputs):
            mixed: torch.Tensor = self._kernels.step_attention(
                query, where, number, self._shape[1], block.windows[number], self._scale
            )
            return mixed
        return attend(query, block, number, self._scale).transpose(1, 2).reshape(block.rows, -1)


class CudaRunner(LayerByLayer):
    """A loop over such layers, recorded by ``recorder``; see :class:`LayerByLayer`."""

    def __init__(self, layers: Sequence[CudaLayer], recorder: Recorder, **parts: Any) -> None:
        super().__init__("fused", [], **parts)
        self._known = tuple(layers)
        self._graphs = StepGraphs(recorder, self._launch)

    def run(
        self, hidden: torch.Tensor | None, block: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        assert hidden is not None
        cos_sin = self._rotary.cos_sin(block, hidden)
        if self._graphs.takes(block):
            outcome = self._graphs.run(hidden, block, first, last, taps, cos_sin)
            if outcome is not None:
                return outcome
        return self._launch(hidden, block, first, last, taps, cos_sin)

    def graphs(self, backend: str) -> str:
        return self._graphs.describe(backend)

    def _launch(
        self,
        hidden: torch.Tensor,
        block: Rows | StepInputs,
        first: int,
        last: int,
        taps: Collection[int],
        cos_sin: CosSin,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        found: dict[int, torch.Tensor] = {}
        delta: torch.Tensor | None = None
        for number in range(first, last):
            if number in taps:
                hidden, delta = hidden if delta is None else hidden + delta, None
                found[number] = hidden
            hidden, delta = self._known[number](hidden, delta, block, cos_sin)
        return hidden if delta is None else hidden + delta, found
