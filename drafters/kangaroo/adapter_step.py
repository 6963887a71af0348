"""Running an adapter for a few rows of each sequence at a time, with cached keys and values.

It computes the same as ``Adapter.forward`` does for a whole text, in half as many operations: queries, keys and values
are one product, gate and up another, and products add residuals themselves. Where the adapter is a whole layer and
there is a native library, one call runs it, up to the logits where the head is packed. A draft costs little more than
reading the weights, so work around the products matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from drafters.kangaroo.adapter import Adapter, rotations
from specdec.runners.attention import attend, attend_all
from specdec.runners.linear import HeadOf, LinearKernel, PackedWeight, linear_kernel
from specdec.runners.native_layers import NativeHead, NativeLayer, NativeLayers, runs_heads_of
from specdec.runners.rotary import rotate, signed
from specdec.runners.rows import Rows
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.joining import joined
from specdec.step.step_io import StepInput

__all__ = ["AdapterCache", "AdapterStep", "Nodes"]

Linear = Callable[[torch.Tensor], torch.Tensor]


class AdapterStep:
    """An adapter's weights in the layout that drafting uses; the adapter's module is not needed afterwards.

    Args:
        adapter: the adapter's module.
        head: the target's head, over the draft vocabulary if there is one; unused if the adapter has its own.
        target_norm: the target's last norm, which only the variant ``none`` uses.

    Attributes:
        config: the adapter's config.
        norm: [D] weight of its last norm; it has the dtype and device of all weights.
        batch_invariant: whether a sequence's logits are equal, bit for bit, with any other sequences beside it.
    """

    def __init__(self, adapter: Adapter, head: Linear, target_norm: Linear | None = None) -> None:
        self.config, self.norm = adapter.config, adapter.norm.detach()
        self._target_norm = target_norm if adapter.config.variant == "none" else None
        self._head = head if adapter.head is None else _stored(adapter.head)
        if self.config.attends:
            self._input_norm = adapter.input_norm.detach()
            self._qkv = _stored(adapter.q_proj, adapter.k_proj, adapter.v_proj)
            self._out = _stored(adapter.o_proj)
        if self.config.has_mlp:
            self._mlp_norm = adapter.mlp_norm.detach()
            self._gate_up, self._down = _stored(adapter.gate_proj, adapter.up_proj), _stored(adapter.down_proj)
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None
        self._layer: NativeLayers | None = None
        self._native_head: NativeHead | None = None
        if self.config.attends and self.config.has_mlp:
            eps = self.config.norm_eps
            products, norms = (self._qkv, self._out, self._gate_up, self._down), (self._input_norm, self._mlp_norm)
            packed = [product for product in products if isinstance(product, PackedWeight)]
            size = self.config.head_dim
            if len(packed) == len(products) and runs_heads_of(size, self.config.intermediate_size):
                layer = NativeLayer(tuple(packed), norms, (eps, eps, 0.0), self.config.groups, size, size**-0.5)
                self._layer = NativeLayers([layer])
                own = self._head.packed if isinstance(self._head, HeadOf) else self._head
                if isinstance(own, PackedWeight):
                    self._native_head = NativeHead(self.norm, eps, own)
        self.batch_invariant = self._layer is not None

    def absorb(self, features: torch.Tensor, cache: KVCache) -> None:
        """Cache keys and values of ``features`` [T, D] as the next T positions."""
        states = self._qkv(self._normed(features, self._input_norm))
        self._store(states, cache, cache.length, range(cache.length, cache.length + len(features)))
        cache.length += len(features)

    def _store(self, states: torch.Tensor, cache: KVCache, first: int, places: Sequence[int]) -> torch.Tensor:
        """Cache keys and values from slot ``first`` on, and return the queries [H, T, d].

        ``states`` [T, (H + 2 Hk) d] are unrotated queries, keys and values; ``places`` are their positions.
        """
        rows, (heads, key_heads) = len(states), self.config.groups
        states = states.view(rows, heads + 2 * key_heads, -1).transpose(0, 1)  # [H + 2 Hk, T, d]
        at = slice(places.start, places.stop) if isinstance(places, range) else places
        cos, signed_sin = (table[0, at] for table in self._rotary(max(places) + 1))
        turned = rotate(states[: heads + key_heads], cos, signed_sin)
        cache.write(0, turned[None, heads:], states[None, heads + key_heads :], first)
        return turned[:heads]

    def guess(self, brought: Sequence[Nodes]) -> list[torch.Tensor]:
        """[N, d] logits behind the nodes of each sequence.

        At the begin of a tree, only the last node gets logits; the nodes before it are text. Their queries are not
        needed, as the keys and values of a single layer depend on the features alone.
        """
        features = [nodes.features for nodes in brought]
        sizes, scored_counts = (
            [len(own) for own in features],
            [one.step.rows if one.step.rows < one.step.tree[-1] else 1 for one in brought],
        )
        rows = features[0] if len(features) == 1 else torch.cat(features)
        if self._layer is None:
            logits = self._apart(rows, brought, sizes, scored_counts)
        else:
            logits = self._native(self._layer, rows, brought, sizes, scored_counts)
        return [logits] if len(brought) == 1 else [*torch.split(logits, scored_counts)]

    def _apart(self, rows: torch.Tensor, brought: Sequence[Nodes], sizes: list[int], wanted: list[int]) -> torch.Tensor:
        hidden = torch.cat([own[-count:] for own, count in zip(torch.split(rows, sizes), wanted, strict=True)])
        if self.config.attends:
            states = torch.split(self._qkv(self._normed(rows, self._input_norm)), sizes)
            seen = [self._attended(*one) for one in zip(states, brought, wanted, strict=True)]
            hidden = self._out.add(torch.cat(seen), hidden)
        if self.config.has_mlp:
            gate, up = self._gate_up(self._normed(hidden, self._mlp_norm)).chunk(2, -1)
            hidden = self._down.add(F.silu(gate).mul_(up), hidden)
        return self._head(self._normed(hidden, self.norm) if self._target_norm is None else self._target_norm(hidden))

    def _attended(self, states: torch.Tensor, nodes: Nodes, wanted: int) -> torch.Tensor:
        """[N, H d] attention outputs of the last N nodes; ``states`` as in ``_store``."""
        (part,) = Rows(nodes.step).parts
        cache, first, last = part.cache, part.length + part.first, part.length + part.last
        if part.parents is None:  # the last node sees everything
            queries = self._store(states, cache, first, range(first, last))
            keys, values = (stored[0].narrow(2, 0, last) for stored in (cache.keys, cache.values))
            attended = attend_all(queries[None, :, -1:], keys, values)
        else:
            places: list[int] = part.numbers[part.first :].tolist()
            attended = attend(self._store(states, cache, first, places)[None], part, 0, self.config.head_dim**-0.5)
        return attended[0].transpose(0, 1).reshape(wanted, -1)

    def _native(
        self,
        layer: NativeLayers,
        rows: torch.Tensor,
        brought: Sequence[Nodes],
        sizes: list[int],
        wanted: list[int],
    ) -> torch.Tensor:
        step, ends = joined([nodes.step for nodes in brought]), accumulate(sizes)
        scored = [row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)]
        head = self._native_head
        reading = None if head is None else head.reading(len(rows), np.array(scored), False)
        cos, signed_sin = self._rotary(step.end)
        hidden, _ = layer.run(rows, step, cos, signed_sin, 0, 1, (), by_row=False, reading=reading)
        if reading is None:
            return self._head(self._normed(hidden[scored], self.norm))
        assert reading.logits is not None
        return reading.logits

    def _rotary(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines whose first half is negated, [1, positions, d], for at least ``end`` positions from 0 on.

        They are float32 for the library, which requires it.
        """
        if self._cos_sin is None or self._cos_sin[0].shape[1] < end:
            places = torch.arange(max(1024, 1 << end.bit_length()), device=self.norm.device)
            cos, sin = rotations(places, self.config, self.norm.dtype)
            cos_sin = cos[None], signed(sin)[None]
            self._cos_sin = cos_sin if self._layer is None else (cos_sin[0].float(), cos_sin[1].float())
        return self._cos_sin

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.norm_eps)


class AdapterCache(KVCache):
    """Keys and values of one sequence in the adapter, a single layer; its positions are separate from the target's.

    Args:
        capacity: most tokens that are ever committed.
        rows: most rows of a tree behind them.
    """

    def __init__(self, adapter: AdapterStep, capacity: int, rows: int = 1) -> None:
        config, like = adapter.config, adapter.norm
        size, heads = config.head_dim, config.groups[1]
        super().__init__([LayerSpec(heads, size, size, None, like.device, like.dtype)], capacity=capacity, rows=rows)


class Nodes(NamedTuple):
    """The next nodes of the tree behind a sequence's text, or the root behind further rows of text.

    Attributes:
        features: [T, D] hidden states at the exit layer.
        step: the nodes in the adapter's cache; without a tree, they are a chain that ends in the root.
    """

    features: torch.Tensor
    step: StepInput


def _stored(*parts: nn.Linear) -> LinearKernel:
    """One product for several linears with the same input."""
    return linear_kernel(torch.cat([part.weight.detach() for part in parts]))
