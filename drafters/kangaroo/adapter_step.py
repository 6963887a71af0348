"""Running an adapter for a few rows of each sequence at a time, with cached keys and values.

It is the layer of ``Adapter.forward``, whose products have the layout of this machine's fastest kernel. Where the
adapter is a whole layer and there is a native library, one call runs it, up to the logits where the head is packed. A
draft costs little more than reading the weights, so work around the products matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from drafters.kangaroo.adapter import Adapter, AdapterTables, adapter_weights
from drafters.shared.own_cache import Nodes, specs_of
from specdec.decoder.rope import Angles
from specdec.execute.layer import keys_values, layer
from specdec.execute.native import NativeHead, run_layers, told_rows
from specdec.execute.native_layers import NativeLayers, Turns, runs_heads_of
from specdec.execute.norm import RmsNorm
from specdec.runners.attention import attend_ends
from specdec.runners.linear import HeadOf, PackedWeight, linear_kernel
from specdec.runners.sent_rows import rows_on
from specdec.step import device_copies
from specdec.step.cache import KVCache
from specdec.step.joining import joined
from specdec.step.step_io import Part, StepInput

__all__ = ["AdapterStep"]

Linear = Callable[[torch.Tensor], torch.Tensor]

_NOWHERE = Angles(torch.empty(0), torch.empty(0))  # of an adapter without attention


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
        self._spec, self._parts = self.config.layer, self.config.parts
        self._weights = adapter_weights(self.config, adapter.state_dict(), linear_kernel)
        own = RmsNorm(self.config.norm, self.norm)
        self._last_norm = target_norm if target_norm is not None and self.config.variant == "none" else own
        self._head = head if adapter.head is None else linear_kernel(adapter.head.weight.detach())
        self._tables = AdapterTables(self.norm.dtype, self.norm.device)
        self._turns = Turns(self._tables, (self._spec.attention.rope,))
        self._layer: NativeLayers | None = None
        self._native_head: NativeHead | None = None
        width = self._spec.attention.head_dim
        packed = self._parts == Part.BOTH and isinstance(self._weights.qkv, PackedWeight)
        if packed and runs_heads_of(width, self.config.intermediate_size):
            self._layer = NativeLayers([self._spec], [self._weights])
            matrix = self._head.packed if isinstance(self._head, HeadOf) else self._head
            if isinstance(matrix, PackedWeight):
                self._native_head = NativeHead(self.norm, self.config.norm_eps, matrix)
        self.batch_invariant = self._layer is not None

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        """An empty cache for ``capacity`` tokens, apart from the target's, and a tree of ``rows`` rows behind them."""
        return KVCache(specs_of([self._spec], self.norm.device, self.norm.dtype), capacity=capacity, rows=rows)

    def absorb(self, features: torch.Tensor, cache: KVCache) -> None:
        """Cache keys and values of ``features`` [T, D] as the next T positions."""
        rows, norm = rows_on(self.norm.device, StepInput.of(cache, range(len(features)))), self._weights.before[0]
        assert norm is not None
        angles = self._tables.of(self._spec.attention.rope, rows)
        if self._layer is not None:  # which turns heads in float32
            angles = Angles(angles.cos.float(), angles.signed_sin.float())
        keys, values = keys_values(self._spec.attention, self._weights, norm(features), angles)
        rows.store(keys.to(values.dtype), values, 0)
        cache.commit(range(len(features)))

    def guess(self, brought: Sequence[Nodes]) -> list[torch.Tensor]:
        """[N, d] logits behind the nodes of each sequence.

        At the begin of a tree, only the last node gets logits; the nodes before it are text. Their queries are not
        needed, as the keys and values of a single layer depend on the features alone.
        """
        features = [nodes.features for nodes in brought if nodes.features is not None]
        counts = [one.step.rows if one.step.rows < one.step.tree[-1] else 1 for one in brought]
        rows = features[0] if len(features) == 1 else torch.cat(features)
        step = joined([nodes.step for nodes in brought])
        if self._layer is None:
            logits = self._head(self._last_norm(self._run(rows, step, counts)))
        else:
            logits = self._native(self._layer, rows, step, counts)
        return [logits] if len(brought) == 1 else [*torch.split(logits, counts)]

    def _run(self, features: torch.Tensor, step: StepInput, counts: Sequence[int]) -> torch.Tensor:
        """[N, D] the last rows of each sequence behind the layer; keys and values of all rows [T, D] are stored."""
        rows, attention, wanted = rows_on(self.norm.device, step), self._spec.attention, step.last_rows(counts)

        def mix(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            rows.store(keys, values, 0)
            return attend_ends(query, rows, 0, attention.scale, counts)

        if not self._parts & Part.ATTENTION:
            features = device_copies.pick(features, wanted)
        angles = self._tables.of(attention.rope, rows) if self._parts & Part.ATTENTION else _NOWHERE
        return layer(self._spec, self._weights, features, angles, mix, self._parts, wanted=wanted)

    def _native(
        self, native: NativeLayers, features: torch.Tensor, step: StepInput, counts: Sequence[int]
    ) -> torch.Tensor:
        """[N, d] logits behind the last rows of each sequence."""
        scored, head = step.last_rows(counts), self._native_head
        reading = None if head is None else head.reading(len(features), np.array(scored), False)
        hidden, _ = run_layers(native, told_rows(step, self._turns), features, 0, 1, reading=reading)
        if reading is None:
            return self._head(self._last_norm(hidden[scored]))
        assert reading.logits is not None
        return reading.logits
