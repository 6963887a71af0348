"""Running single layers of transformers' classes, as heads have some: a known one as a few operations, any other by its
own module, which is called with the rows in place of a transformers cache. What it caches is read so, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from specdec.errors import TargetError
from specdec.runners.attention import ATTENTION, layer_attention, update_and_attend
from specdec.runners.known_layers import KnownLayer
from specdec.runners.linear import LinearKernel
from specdec.runners.replicas import Evaluated
from specdec.runners.rotary import Angles, rotate
from specdec.runners.rows import Rows
from specdec.step.state import LayerSpec

__all__ = ["FusedLayer", "FusedNorm", "ModuleLayer", "ProbeLayer"]

_PROBE = "specdec_probe"  # the name of ``_note_layer`` among transformers' attention functions


class ModuleLayer:
    """A layer's own module, called as a replica whose config names specdec's attention function.

    Args:
        layer: the decoder layer.
        kind: the kind of its attention if rotary positions depend on it, else None.
        arguments: its arguments besides hidden states and positions.
    """

    _attention: ClassVar[str] = ATTENTION

    def __init__(self, layer: Any, kind: str | None, cache_argument: str, **arguments: Any) -> None:
        self._name, self._kind, self._cache_argument = type(layer).__name__, kind, cache_argument
        self._arguments = {"attention_mask": None, "use_cache": True, **arguments}
        self._layer = Evaluated(layer, attention=self._attention)

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

    One product for queries, keys and values and one for gate and up, lean norms, rotary on queries and keys at once,
    residuals added by the product itself. ``kernels``: its four products.
    """

    def __init__(self, layer: KnownLayer, kernels: Sequence[LinearKernel]) -> None:
        self._number, self._scale, self._head_dim = layer.number, layer.scale, layer.head_dim
        self._query_heads, self._turned = layer.query_heads, layer.query_heads + layer.key_heads
        self._kernels = kernels
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


class ProbeLayer(ModuleLayer):
    """A layer's own module without a cache, for an attention function that only looks."""

    _attention = _PROBE

    def _call(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        arguments = {name: value for name, value in given.items() if not isinstance(value, Rows)}
        return self._layer(hidden, **arguments)


def _note_layer(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    note: Callable[[LayerSpec], None] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that only notes what its layer will cache, [1, heads, 1, dim], and its window.

    Raises:
        TargetError: the layer keeps its arguments to itself, and ``note`` with them.
    """
    if note is None:
        raise TargetError(
            f"{type(module).__name__} is not handed the arguments that its decoder layer was given, so specdec's rows "
            "do not reach the attention; such models are not supported"
        )
    note(LayerSpec(key.shape[1], key.shape[-1], value.shape[-1], sliding_window, key.device, key.dtype))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


for _name, _function in ((ATTENTION, layer_attention), (_PROBE, _note_layer)):
    AttentionInterface.register(_name, _function)
