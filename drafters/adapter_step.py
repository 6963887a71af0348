"""An adapter at work: one sequence, a few rows at a time, with keys and values kept.

It computes what ``Adapter.forward`` does for a whole text, in half the operations: one product for queries, keys and
values and one for gate and up, residuals added by the product itself. A draft costs little more than reading weights,
so what surrounds the products counts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from drafters.adapter import Adapter, rotations

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
        self._head = None if adapter.head is None else adapter.head.weight.detach()
        if self._attends:
            self._input_norm = adapter.input_norm.detach()
            self._qkv = torch.cat([part.weight.detach() for part in (adapter.q_proj, adapter.k_proj, adapter.v_proj)])
            self._out = adapter.o_proj.weight.detach().t()
        if self._has_mlp:
            self._mlp_norm = adapter.mlp_norm.detach()
            self._gate_up = torch.cat([part.weight.detach() for part in (adapter.gate_proj, adapter.up_proj)])
            self._down = adapter.down_proj.weight.detach().t()

    def absorb(self, features: torch.Tensor, cache: AdapterCache) -> torch.Tensor:
        """Cache keys and values of ``features`` [T, D] as the next T positions; returns their queries [H, T, d]."""
        rows, heads = len(features), self.config.heads
        normed = self._normed(features, self._input_norm)
        states = F.linear(normed, self._qkv).view(rows, 3 * heads, -1).transpose(0, 1)  # [3 H, T, d]
        cos, signed = cache.rotary(rows)
        turning = states[: 2 * heads]
        # A half turn is a roll; its sign is in the sines.
        turned = torch.addcmul(turning * cos, turning.roll(turning.shape[-1] // 2, -1), signed)
        cache.append(turned[heads:], states[2 * heads :])
        return turned[:heads]

    def step(self, features: torch.Tensor, cache: AdapterCache) -> torch.Tensor:
        """Hidden state [1, D] for the head, after the last of ``features`` [T, D], the next T positions.

        With a single layer, keys and values depend on the features alone, so only the last row needs a query; and as it
        sees everything, no mask.
        """
        hidden = features[-1:]
        if self._attends:
            query = self.absorb(features, cache)[None, :, -1:]
            seen = F.scaled_dot_product_attention(query, *cache.seen())  # [1, H, 1, d]
            hidden = torch.addmm(hidden, seen.reshape(1, -1), self._out)
        if self._has_mlp:
            gate, up = F.linear(self._normed(hidden, self._mlp_norm), self._gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, F.silu(gate).mul_(up), self._down)
        return self._normed(hidden, self.norm)

    def logits(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[..., V] of what ``step`` returned; ``head`` is the target's, used unless the adapter has its own."""
        return head(hidden) if self._head is None else F.linear(hidden, self._head)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)


class AdapterCache:
    """Keys and values of one sequence's adapter, [1, heads, capacity, D / heads]; its positions are its own."""

    def __init__(self, adapter: AdapterStep, capacity: int) -> None:
        config, like = adapter.config, adapter.norm
        self.length = 0
        shape = (1, config.heads, capacity, config.hidden_size // config.heads)
        self.keys, self.values = (torch.empty(shape, dtype=like.dtype, device=like.device) for _ in range(2))
        self._cos, sin = rotations(torch.arange(capacity, device=like.device), config, like.dtype)
        first, second = sin.chunk(2, -1)
        self._signed = torch.cat((-first, second), -1)

    def rotary(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the first half negated, [rows, D / heads] of the next positions."""
        last = self.length + rows
        return self._cos[self.length : last], self._signed[self.length : last]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the next positions' keys and values [heads, T, D / heads]."""
        rows = keys.shape[1]
        self.keys[0].narrow(1, self.length, rows).copy_(keys)
        self.values[0].narrow(1, self.length, rows).copy_(values)
        self.length += rows

    def seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All that is stored."""
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)
