"""Running layers one by one: known layers as a few operations (``fused``), others by their own modules.

Known layers take a third of the operations, on any device: one product for queries, keys and values and one for gate
and up, lean norms, rotary on queries and keys at once, residuals added by the product itself. A layer's own module is
called with the rows in place of a transformers cache. Models are read so, too: what they cache, and how they round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from specdec.errors import TargetError
from specdec.runners.attention import ATTENTION, update_and_attend
from specdec.runners.experts import choose_all, has_experts
from specdec.runners.known_layers import KnownLayer, is_known_norm, stacked
from specdec.runners.linear import DenseLinear, LinearKernel
from specdec.runners.memory_pages import FilePages
from specdec.runners.replicas import Evaluated
from specdec.runners.rotary import Angles, Rotary, rotate
from specdec.runners.rows import Rows
from specdec.runners.runner import Layer, LayerRunner
from specdec.runners.snapshot import Snapshot

__all__ = ["FusedLayer", "FusedNorm", "LayerByLayer", "ModuleLayer", "stack_linears"]


class ModuleLayer:
    """A layer's own module, called as a replica whose config names specdec's attention function.

    Args:
        layer: the decoder layer.
        kind: the kind of its attention if rotary positions depend on it, else None.
        arguments: its arguments besides hidden states and positions.
    """

    _attention: ClassVar[str] = ATTENTION
    _dtype: torch.dtype | None = None

    def __init__(self, layer: Any, kind: str | None, cache_argument: str, **arguments: Any) -> None:
        self._name, self._kind, self._cache_argument = type(layer).__name__, kind, cache_argument
        self._arguments = {"attention_mask": None, "use_cache": True, **arguments}
        self._layer = Evaluated(layer, attention=self._attention, dtype=self._dtype)
        self.look = self._layer.look
        self._mixes = has_experts(layer)

    def every_expert(self, every: bool) -> None:
        """Whether each row has all experts, where the layer has a known router."""
        self._layer.prepare = choose_all if every and self._mixes else None

    def __call__(self, hidden: torch.Tensor, rows: Rows, angles: Angles) -> torch.Tensor:
        cos, sin = angles.of_kind(self._kind)
        given = {**self._arguments, self._cache_argument: rows, "rows": rows}
        given |= {"position_ids": rows.positions, "position_embeddings": (cos[None], sin[None])}
        output: torch.Tensor = self._call(hidden[None], given)
        return output[0]

    def _call(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        rows: Rows = given["rows"]
        before = rows.attended
        output = self._layer(hidden, **given)
        if rows.attended == before:
            raise TargetError(
                f"a {self._name} did not hand specdec's rows to its attention: a function that was put in place of a "
                "forward calls the module by a global name, or through an object; bind it to the module "
                "(types.MethodType), or use plain generate"
            )
        return output


class FusedNorm:
    """RMS norm. On a CPU in full precision as four operations; torch's own is one call made of nine."""

    def __init__(self, norm: Any) -> None:
        self.weight, self.epsilon = norm.weight.data, norm.variance_epsilon
        self._lean = self.weight.device.type == "cpu" and self.weight.dtype in (torch.float32, torch.float64)
        if self._lean:
            # x w / sqrt(|x|^2 / D + e) = x (w sqrt D) / hypot(|x|, sqrt(D e))
            size = self.weight.shape[0]
            self._scaled = self.weight * math.sqrt(size)
            self._floor = torch.tensor(math.sqrt(size * self.epsilon), dtype=self.weight.dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] normed over the last dimension."""
        if not self._lean:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.epsilon)
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        normed: torch.Tensor = (hidden * self._scaled).div_(length.hypot_(self._floor))
        return normed


class FusedLayer:
    """A known layer in a third of the operations.

    With ``files`` the model is ours: its linears become views of the stacked weights, so that none is held twice.
    Otherwise they are left alone, and stacked weights are copies. ``kernels``: its four products, made elsewhere.
    """

    def __init__(
        self, layer: KnownLayer, files: FilePages | None, kernels: Sequence[LinearKernel] | None = None
    ) -> None:
        self._number, self._scale, self._head_dim = layer.number, layer.scale, layer.head_dim
        self._query_heads, self._turned = layer.query_heads, layer.query_heads + layer.key_heads
        self._kernels: Sequence[LinearKernel] = stack_linears(layer, files) if kernels is None else kernels
        self._first_norm, self._second_norm = map(FusedNorm, layer.norms)
        self._head_norm = layer.head_norm()

    def __call__(self, residual: torch.Tensor, rows: Rows, angles: Angles) -> torch.Tensor:
        """[T, D] to [T, D]."""
        qkv, out, gate_up, down = self._kernels
        count = residual.shape[0]
        heads = qkv(self._first_norm(residual)).view(1, count, -1, self._head_dim).transpose(1, 2)  # [1, H, T, d]
        turned = heads[:, : self._turned]
        if self._head_norm is not None:
            weight, epsilon = self._head_norm
            turned = F.rms_norm(turned, (self._head_dim,), None, epsilon) * weight
        turned = rotate(turned, angles.cos, angles.signed_sin)
        query, keys = turned[:, : self._query_heads], turned[:, self._query_heads :]
        mixed = update_and_attend(rows, query, keys, heads[:, self._turned :], self._number, self._scale)
        residual = out.add(mixed.transpose(1, 2).reshape(count, -1), residual)
        gate, up = gate_up(self._second_norm(residual)).chunk(2, -1)
        return down.add(F.silu(gate).mul_(up), residual)


def stack_linears(layer: KnownLayer, files: FilePages | None) -> list[DenseLinear]:
    """A layer's four products: for queries, keys and values; after attention; for gate and up; and down.

    With ``files`` the model is ours: its linears become views of the stacked weights, so that none is held twice.
    """
    products = [DenseLinear(*stacked(group)) for group in layer.linears]
    if files is not None:
        for group, product in zip(layer.linears, products, strict=True):
            if len(group) > 1:
                files.release(_share([place.module for place in group], product))
    return products


def _share(linears: Sequence[Any], kernel: DenseLinear) -> list[torch.Tensor]:
    """Make linears read the weight that they were stacked to; returns their former weights."""
    start, former = 0, [linear.weight.data for linear in linears]
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = kernel.weight[start:stop]
        if kernel.bias is not None:
            linear.bias.data = kernel.bias[start:stop]
        start = stop
    return former


class LayerByLayer(LayerRunner):
    """A loop over layers.

    Args:
        name: ``fused``, or what the layers are run for.
        layers: called one after the other.
        holders, modules: of the model, see :class:`Snapshot`; no modules where its own run everything.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[Layer],
        *,
        embedding: nn.Module,
        norm: nn.Module,
        head: nn.Module,
        rotary: Rotary,
        holders: Sequence[nn.Module],
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.name, self._layers, self._rotary = name, tuple(layers), rotary
        self.borrows = any(isinstance(layer, ModuleLayer) for layer in layers)
        fused = name == "fused" and is_known_norm(norm)
        self.embed, self.head = Evaluated(embedding), Evaluated(head)
        self.norm = FusedNorm(norm) if fused else Evaluated(norm)
        read = [*modules, norm] if fused else modules
        self._snapshot = Snapshot(read, holders=holders, root=next(iter(holders), None), everywhere=fused)

    def run(
        self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        assert hidden is not None
        angles, found = self._rotary.of(rows, hidden), {}
        for number in range(first, last):
            if number in taps:
                found[number] = hidden
            hidden = self._layers[number](hidden, rows, angles)
        return hidden, found

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        layers = [layer for layer in self._layers if isinstance(layer, ModuleLayer)]
        for layer in layers:
            layer.every_expert(True)
        try:
            yield
        finally:
            for layer in layers:
                layer.every_expert(False)

    def look(self) -> None:
        super().look()
        for layer in self._layers:
            if isinstance(layer, ModuleLayer):
                layer.look()

    def changed(self) -> str | None:
        return self._snapshot.changed()
