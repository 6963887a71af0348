"""An EAGLE head's layer, its last norm and its head in one or two calls of the native library.

A native layer norms its stream, and attention and MLP add to it. EAGLE-1's layer has no first norm, so its norm here is
the identity. The layer of EAGLE-3 reads two normed halves side by side: its attention runs on a stream of both, and its
MLP on the layer's own stream, each as a native layer whose other part adds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafters.heads.layers import Linear, product
from drafters.heads.weights import Chain
from specdec.runners.half_layers import Beside, attention_alone, mlp_alone
from specdec.runners.linear import HeadOf, LinearKernel, PackedWeight
from specdec.runners.native_layers import NativeHead, NativeLayer, NativeLayers, runs_heads_of
from specdec.runners.rotary import Rotary
from specdec.step.block import Rows

__all__ = ["NativeChain"]

# A norm that is the identity: x w / sqrt(mean(x^2) + e) with e far larger than any square and w its root.
_EPSILON, _GAIN = 1e12, 1e6


class NativeChain:
    """The native layer of a head with one layer.

    Args:
        head: the head's modules.
        products: the packed products: queries, keys and values; attention's output; gate and up; down.
        last: the head's last product; None where only its own module computes it.
        rotary: the head's rotary positions.
    """

    def __init__(
        self, head: Chain, products: Sequence[PackedWeight], last: PackedWeight | None, rotary: Rotary
    ) -> None:
        config, layer = head.config, head.layers[0]
        self._config, self._rotary = config, rotary
        dtype, width = products[0].dtype, config.width
        own: Any = layer
        same = torch.full((products[0].inputs,), _GAIN)
        after, eps, size = own.post_attention_layernorm.weight.detach(), config.norm_eps, config.head_dim
        attention = own.self_attn
        per_head = None
        if config.qk_norm:
            heads = [attention.q_norm.weight] * config.heads + [attention.k_norm.weight] * config.key_heads
            per_head = torch.stack([weight.detach() for weight in heads])[:, None]
        groups, scale = (config.heads, config.key_heads), size**-0.5
        behind = torch.ones(2 * width) if config.wide else after
        whole = NativeLayer(tuple(products), (same, behind), (_EPSILON, eps, eps), groups, size, scale, per_head)
        self._first = NativeLayers([attention_alone(whole) if config.wide else whole])
        self._second: NativeLayers | None = None
        if config.wide:
            second = NativeLayer(tuple(products), (torch.ones(width), after), (eps, eps, 0.0), groups, size, scale)
            self._second, self._beside = NativeLayers([mlp_alone(second)]), Beside(1, dtype)
        norm = (torch.full((width,), _GAIN), _EPSILON) if config.kind == "eagle" else (head.norm.weight.detach(), eps)
        self._head = None if last is None else NativeHead(*norm, last)
        self._like = torch.empty(1, 0, dtype=dtype)
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, head: Chain, last: Linear, rotary: Rotary) -> NativeChain | None:
        """The native layer of a head; None where the library cannot run it."""
        config = head.config
        own: Any = last.packed if isinstance(last, HeadOf) else last
        if config.layers > 1 or config.activation not in ("silu", "swish") or not rotary.fixed:
            return None
        if not runs_heads_of(config.head_dim, config.intermediate_size):
            return None
        layer: Any = head.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        out: LinearKernel = product(attention.o_proj)
        if config.wide and isinstance(out, PackedWeight):  # it adds to the second half of the stream
            weight, bias = attention.o_proj.weight.detach(), attention.o_proj.bias
            low = torch.zeros_like(weight)
            out = PackedWeight(torch.cat((low, weight)), None if bias is None else torch.cat((0 * bias, bias)).detach())
        made = (
            product(attention.q_proj, attention.k_proj, attention.v_proj),
            out,
            product(mlp.gate_proj, mlp.up_proj),
            product(mlp.down_proj),
        )
        packed = [one for one in made if isinstance(one, PackedWeight)]
        fits = isinstance(own, PackedWeight) and own.dtype is layer.mlp.down_proj.weight.dtype
        return cls(head, packed, own if fits else None, rotary) if len(packed) == len(made) else None

    def guess(
        self, rows: Rows, inputs: torch.Tensor, residual: torch.Tensor | None, wanted: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Logits [N, d] behind the ``wanted`` rows, and their hidden states [N, W] for the next level.

        Where the library does not compute logits, they are None, and the hidden states are those before the last norm.

        Args:
            rows: T rows; their keys and values are stored.
            inputs: [T, W] the layer's stream; of a wide head [T, 2 W] what its attention reads.
            residual: [T, W] what a wide layer's stream has beside the second half of ``inputs``; None for nothing.
            wanted: row numbers.
        """
        count, final, head = len(wanted), self._config.norm_output, self._head
        every = count == rows.rows
        if self._second is None:
            reading = None if head is None else head.reading(rows.rows, None if every else wanted, final)
            states, _ = self._first.run(inputs, rows, *self._turns(rows), 0, 1, (), by_row=False, reading=reading)
        else:
            found, _ = self._first.run(inputs, rows, *self._turns(rows), 0, 1, (), by_row=False)
            stream = found[:, self._config.width :]
            stream = stream if residual is None else stream + residual
            stream, every = stream if every else stream[wanted], True
            reading = None if head is None else head.reading(count, None, final)
            alone, angles = self._beside.rows(count)
            states, _ = self._second.run(stream, alone, angles, angles, 0, 1, (), reading=reading)
        if reading is not None and reading.normed is not None:
            states = reading.normed
        return None if reading is None else reading.logits, states if every else states[wanted]

    def _turns(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [1, positions, d], float32, of positions 0, 1, 2, ..."""
        if self._cos_sin is None or self._cos_sin[0].shape[1] < rows.end:
            cos, _, signed_sin = self._rotary.whole(rows, self._like)
            self._cos_sin = cos[None].float(), signed_sin[None].float()
        return self._cos_sin
