"""Known layers on a CUDA device: nine launches each, of kernels in Triton.

In half precision every number of a row is computed alike whatever rows are beside it (:mod:`specdec.kernels.product`,
:mod:`specdec.kernels.step`): of a step or of a prompt, recorded or launched, of one sequence or of several. So a text
does not depend on what was drafted. In full precision, and where attention is asked for by name, the products are
cuBLAS's, which sum otherwise for other numbers of rows.

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
from torch import nn

from specdec.attention import attend
from specdec.block import Block, Rows
from specdec.pages import FilePages
from specdec.runners.graphs import Recorder, StepGraphs, StepInputs, Turns
from specdec.runners.known import KnownLayer, is_known_norm, why_special
from specdec.runners.layers import LayerByLayer, stack_linears
from specdec.runners.linear import DenseLinear

__all__ = ["CudaLayer", "CudaRunner"]

_HALF = (torch.float16, torch.bfloat16)


class CudaLayer:
    """A known layer in nine launches; with ``files`` its linears become views of the stacked weights.

    Attributes:
        alike: whether its products round a row alike whatever rows are beside it.
        norm: weight [D] and epsilon of its first norm.
    """

    def __init__(self, layer: KnownLayer, files: FilePages | None, kernels: ModuleType) -> None:
        self._number, self._scale = layer.number, layer.scale
        self._shape = layer.query_heads, layer.key_heads, layer.head_dim
        self._products = stack_linears(layer, files)
        self._norms = [(norm.weight.data, norm.variance_epsilon) for norm in layer.norms]
        self._head_norms = None
        if layer.head_norms:
            query, key = layer.head_norms
            self._head_norms = (query.weight.data, key.weight.data, query.variance_epsilon)
        self.norm = self._norms[0]
        self._kernels = kernels
        self.alike = all(one.weight.dtype in _HALF and one.weight.is_contiguous() for one in self._products)

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        block: Rows | StepInputs,
        turns: Turns,
        segments: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual [T, D] and what is to be added to it, to the same after the layer.

        ``turns``: cosines and sines [positions, d], and each row's place in them; ``segments``: of a text, at most.
        """
        qkv, out, gate_up, down = self._products
        kernels, (cos, sin, at), own = self._kernels, turns, self.alike and block.backend == "auto"
        residual, normed = kernels.add_norm(residual, delta, *self._norms[0])
        heads = self._product(normed, qkv, own)
        # Each sequence's rows are stored in its own cache, so that a batch takes some launches more for each of them.
        parts = [
            self._attend(heads[..., first:last, :], part, cos, sin, at[first:last], own, segments)
            for part, first, last in block.parts
        ]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        residual, normed = kernels.add_norm(residual, self._product(mixed, out, own), *self._norms[1])
        if own:
            gated = kernels.product(normed, gate_up.weight, gate_up.bias, gated=True)
        else:
            gated = kernels.gate(F.linear(normed, gate_up.weight, gate_up.bias))
        return residual, self._product(gated, down, own)

    def _product(self, rows: torch.Tensor, linear: DenseLinear, own: bool) -> torch.Tensor:
        if not own:
            return F.linear(rows, linear.weight, linear.bias)
        product: torch.Tensor = self._kernels.product(rows, linear.weight, linear.bias)
        return product

    def _attend(
        self,
        heads: torch.Tensor,
        block: Block | StepInputs,
        cos: torch.Tensor,
        sin: torch.Tensor,
        at: torch.Tensor,
        own: bool,
        segments: int,
    ) -> torch.Tensor:
        """One sequence's rows [T, heads x d] to what they attend to, [T, query heads x d]."""
        number, where = self._number, block.where()
        query = self._kernels.turn_and_store(
            heads.contiguous(), cos, sin, at, self._head_norms, where, number, self._shape
        )
        if own or isinstance(block, StepInputs):
            window = block.windows[number] if isinstance(block, StepInputs) else block.cache.group_of[number].window
            mixed: torch.Tensor = self._kernels.step_attention(
                query, where, number, self._shape[1], window, self._scale, segments
            )
            return mixed
        return attend(query, block, number, self._scale).transpose(1, 2).reshape(block.rows, -1)


class CudaRunner(LayerByLayer):
    """A loop over such layers, recorded by ``recorder``; see :class:`LayerByLayer`.

    ``longest``: tokens of a text, as the model has it; a longer one has the graphs recorded anew.
    """

    def __init__(
        self, layers: Sequence[CudaLayer], recorder: Recorder, kernels: ModuleType, longest: int, **parts: Any
    ) -> None:
        norm, head = parts["norm"], parts["head"]
        known = (
            is_known_norm(norm)
            and type(head) is nn.Linear
            and why_special(head) is None
            and head.weight.is_contiguous()
        )
        alike = known and all(layer.alike for layer in layers)
        super().__init__("fused", [], **{**parts, "modules": [*parts["modules"], *([head] if alike else [])]})
        self._known, self._kernels, self._longest = tuple(layers), kernels, longest
        self._graphs = StepGraphs(recorder, self._launch)
        self.alike = alike
        if alike:
            self.norm = _Norm(kernels, norm)
            self.head = _Head(kernels, head)

    def run(
        self, hidden: torch.Tensor | None, block: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        assert hidden is not None
        if block.end > self._longest:
            self._longest = self._graphs.kind = 2 * block.end
        turns = self._rotary.turns(block, hidden)
        if self._graphs.takes(block):
            outcome = self._graphs.run(hidden, block, first, last, taps, turns)
            if outcome is not None:
                return outcome
        return self._launch(hidden, block, first, last, taps, turns)

    def graphs(self, backend: str) -> str:
        return self._graphs.told(backend)

    def _launch(
        self, hidden: torch.Tensor, block: Rows | StepInputs, first: int, last: int, taps: Collection[int], turns: Turns
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        found: dict[int, torch.Tensor] = {}
        delta: torch.Tensor | None = None
        segments = self._kernels.segments_of(self._longest)
        if block.backend == "auto":
            self._find_paths(block)
        for number in range(first, last):
            if number in taps:
                hidden, delta = self._sum(hidden, delta, number), None
                found[number] = hidden
            hidden, delta = self._known[number](hidden, delta, block, turns, segments)
        return self._sum(hidden, delta, last - 1), found

    def _sum(self, hidden: torch.Tensor, delta: torch.Tensor | None, number: int) -> torch.Tensor:
        """What goes on from a layer, added as the next norm would add it."""
        if delta is None:
            return hidden
        total: torch.Tensor = self._kernels.add_norm(hidden, delta, *self._known[number].norm)[0]
        return total

    def _find_paths(self, block: Rows | StepInputs) -> None:
        """Have what attention reads of each row's way through the tree; of a chain it is known."""
        for part, _, _ in block.parts:
            where = part.where()
            if "closure" in where:
                where["paths"] = self._kernels.paths(where)
            elif isinstance(part, Block) and "paths" not in where:
                where["places"] = part.positions[0]
                depths = torch.arange(part.rows, dtype=torch.int32, device=where["places"].device)
                where["paths"] = depths.repeat(part.rows, 1)


class _Norm:
    """A plain RMS norm of rows of any shape [..., D]."""

    def __init__(self, kernels: ModuleType, norm: Any) -> None:
        self._kernels, self.weight, self.epsilon = kernels, norm.weight.data, norm.variance_epsilon

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        normed: torch.Tensor = self._kernels.add_norm(rows, None, self.weight, self.epsilon)[1]
        return normed.view(hidden.shape)


class _Head:
    """A plain head, [..., D] to [..., V]."""

    def __init__(self, kernels: ModuleType, head: nn.Linear) -> None:
        self._kernels, self._head = kernels, head

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._head
        rows = hidden.reshape(-1, hidden.shape[-1])
        bias = None if head.bias is None else head.bias.data
        logits: torch.Tensor = self._kernels.product(rows, head.weight.data, bias, whole=True)
        return logits.view(*hidden.shape[:-1], -1)
