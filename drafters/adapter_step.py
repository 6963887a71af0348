"""An adapter at work: one sequence, a few rows at a time, with keys and values kept.

It computes what ``Adapter.forward`` does for a whole text, in half the operations: one product for queries, keys and
values and one for gate and up, residuals added by the product itself; where the adapter is a whole layer and there is
a native library, in one call. A draft costs little more than reading weights, so what surrounds the products counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from drafters.adapter import Adapter, rotations
from specdec.attention import attend_all
from specdec.block import Block
from specdec.cache import KVCache, LayerSpec
from specdec.rotary import rotate, signed
from specdec.runners.linear import LinearKernel, PackedWeight, linear_kernel
from specdec.runners.native import NativeLayer, NativeLayers, runs_heads_of

__all__ = ["AdapterCache", "AdapterStep"]


class AdapterStep:
    """An adapter's weights, laid out for drafting; the adapter itself is not needed any more.

    Attributes:
        config: the adapter's.
        norm: [D] weight of its last norm, which tells dtype and device.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.config, self.norm = adapter.config, adapter.norm.detach()
        self._attends, self._has_mlp = adapter.config.variant != "mlp", adapter.config.variant in ("layer", "mlp")
        self._head = None if adapter.head is None else _stored(adapter.head)
        if self._attends:
            self._input_norm = adapter.input_norm.detach()
            self._qkv = _stored(adapter.q_proj, adapter.k_proj, adapter.v_proj)
            self._out = _stored(adapter.o_proj)
        if self._has_mlp:
            self._mlp_norm = adapter.mlp_norm.detach()
            self._gate_up, self._down = _stored(adapter.gate_proj, adapter.up_proj), _stored(adapter.down_proj)
        self._layer: NativeLayers | None = None
        if self._attends and self._has_mlp:
            heads, eps = self.config.heads, self.config.norm_eps
            products, norms = (self._qkv, self._out, self._gate_up, self._down), (self._input_norm, self._mlp_norm)
            packed = [product for product in products if isinstance(product, PackedWeight)]
            size = len(self.norm) // heads
            if len(packed) == len(products) and runs_heads_of(size, self.config.intermediate_size):
                layer = NativeLayer(tuple(packed), norms, (eps, eps, 0.0), (heads, heads), size, size**-0.5)
                self._layer = NativeLayers([layer])

    def absorb(self, features: torch.Tensor, cache: AdapterCache) -> torch.Tensor:
        """Cache keys and values of ``features`` [T, D] as the next T positions; returns their queries [H, T, d]."""
        rows, heads = len(features), self.config.heads
        normed = self._normed(features, self._input_norm)
        states = self._qkv(normed).view(rows, 3 * heads, -1).transpose(0, 1)  # [3 H, T, d]
        cos, signed_sin = cache.rotary(rows)
        turned = rotate(states[: 2 * heads], cos, signed_sin)
        cache.write(0, turned[None, heads:], states[None, 2 * heads :], cache.length)
        cache.length += rows
        return turned[:heads]

    def step(self, features: torch.Tensor, cache: AdapterCache) -> torch.Tensor:
        """Hidden state [1, D] for the head, after the last of ``features`` [T, D], the next T positions.

        With a single layer, keys and values depend on the features alone, so only the last row needs a query; and as it
        sees everything, no mask.
        """
        if self._layer is not None:
            block = Block(cache, [0] * len(features))
            hidden, _ = self._layer.run(features, block, *cache.rotary(len(features)), 0, 1, ())
            cache.length += len(features)
            return self._normed(hidden[-1:], self.norm)
        hidden = features[-1:]
        if self._attends:
            query = self.absorb(features, cache)[None, :, -1:]
            seen = attend_all(query, *cache.seen())  # [1, H, 1, d]
            hidden = self._out.add(seen.reshape(1, -1), hidden)
        if self._has_mlp:
            gate, up = self._gate_up(self._normed(hidden, self._mlp_norm)).chunk(2, -1)
            hidden = self._down.add(F.silu(gate).mul_(up), hidden)
        return self._normed(hidden, self.norm)

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[..., V] of what ``step`` returned; ``head`` is the target's, used unless the adapter has its own."""
        return (head if self._head is None else self._head)(hidden)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)


class AdapterCache(KVCache):
    """Keys and values of one sequence's adapter, a single layer; its positions are its own."""

    def __init__(self, adapter: AdapterStep, capacity: int) -> None:
        config, like = adapter.config, adapter.norm
        size = config.hidden_size // config.heads
        super().__init__(
            [LayerSpec(config.heads, size, size, None, like.device, like.dtype)], capacity=capacity, rows=1
        )
        self._cos, sin = rotations(torch.arange(capacity, device=like.device), config, like.dtype)
        self._signed = signed(sin)

    def rotary(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the first half negated, [rows, D / heads] of the next positions."""
        last = self.length + rows
        return self._cos[self.length : last], self._signed[self.length : last]

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is stored, [1, heads, length, D / heads] each."""
        return self.keys[0].narrow(2, 0, self.length), self.values[0].narrow(2, 0, self.length)


def _stored(*parts: nn.Linear) -> LinearKernel:
    """One product for linears of one input."""
    return linear_kernel(torch.cat([part.weight.detach() for part in parts]))
