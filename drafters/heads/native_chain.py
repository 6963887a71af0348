"""An EAGLE head of one layer in the native library: one call for a pass, or for a whole draft.

A native layer norms its stream, and attention and MLP add to it. EAGLE-1's layer has no first norm, so its norm here is
the identity. The layer of EAGLE-3 reads two normed halves side by side: its attention runs on a stream of both, and its
MLP on the layer's own stream, each as a native layer whose other part adds zeros.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from typing import Any, cast

import torch

from drafters.heads.forward import HeadForward
from drafters.heads.layers import Linear, embedding_rows
from drafters.heads.native_parts import NativeParts, packed, packed_head, runs
from drafters.heads.weights import Chain
from specdec.decoder.rope import RopeTables
from specdec.native.library import library
from specdec.native.types import CChain, CHead, CShape, place_of
from specdec.runners.half_layers import attention_alone, mlp_alone
from specdec.runners.linear import PackedWeight
from specdec.runners.native_layers import (
    NativeLayer,
    NativeLayers,
    address_of,
    described_rows,
)
from specdec.step.step_io import StepInput
from specdec.step.torch_switches import HOST
from specdec.target import Target

__all__ = ["NativeChain"]

# A norm that is the identity: x w / sqrt(mean(x^2) + e) with e far larger than any square and w its root.
_EPSILON, _GAIN = 1e12, 1e6


class NativeChain(NativeParts):
    """The weights of a head with one layer, as the library reads them.

    Args:
        head: the head's modules.
        products: the packed products: queries, keys and values; attention's output; gate and up; down.
        fc: the packed product in front of the layer, if there is one.
        last: the head's last product; None where only its own module computes it.
        forward: the head.
        ropes: the head's rotary positions.
        embedding: the embedding's weight; None where only its own module embeds.

    Attributes:
        described: the head for the library.
        embeds: whether the library has the embedding; otherwise rows come with their embeddings.
        grows: whether the library can grow a whole draft.
        taps: number of the target's hidden states that a row reads.
    """

    def __init__(
        self,
        head: Chain,
        products: Sequence[PackedWeight],
        fc: PackedWeight | None,
        last: PackedWeight | None,
        forward: HeadForward,
        ropes: RopeTables,
        embedding: PackedWeight | torch.Tensor | None,
    ) -> None:
        super().__init__(ropes, forward.spec.layers[0].attention.rope, products[0].dtype)
        self._config = config = head.config
        self._outputs = None if last is None else last.outputs
        self._hold((*products, last, embedding))
        self.features = config.hidden_size * (len(config.taps) or 1)
        own: Any = head
        if fc is not None:
            self.features = fc.inputs - (0 if config.wide else config.width)
        self.taps = self.features // config.hidden_size
        layers, attention = self._layers(head, products, forward.layers[0].heads)
        fused = None if fc is None else addressof(self._hold(fc).described)
        norms = {"none": [], "whole": [getattr(own, "input_norm", None)], "each": getattr(own, "fc_norm", ())}
        found: list[Any] = [*norms[config.norm_inputs]]
        self.embeds = embedding is not None
        self.grows = self.embeds and last is not None
        drafted = head.draft_tokens
        self.described = CChain(
            layers.described[0],
            CShape() if attention is None else attention.described[0],
            layer=addressof(layers.described[1]),
            attention=None if attention is None else addressof(attention.described[1]),
            head=None if last is None else addressof(self._hold(self._last(head, last))),
            fuse=fused if config.wide else None,
            join=None if config.wide else fused,
            embedding=addressof(embedding.described) if isinstance(embedding, PackedWeight) else None,
            table=address_of(embedding) if isinstance(embedding, torch.Tensor) else None,
            features_norm=self._weights(*(norm.weight for norm in found)) if found else None,
            embedded_norm=self._weights(own.layers[0].input_layernorm.weight) if config.wide else None,
            hidden_norm=self._weights(own.layers[0].hidden_norm.weight) if config.wide else None,
            drafted=None if drafted is None else self._hold(drafted.long().contiguous()).data_ptr(),
            width=config.width,
            features=self.features,
            taps=self.taps,
            norms=len(found),
            vocabulary=config.vocab_size,
            from_norm=config.norm_before_residual,
            final=config.norm_output,
            epsilon=config.norm_eps,
        )

    def _layers(
        self, head: Chain, products: Sequence[PackedWeight], head_norm: torch.Tensor | None
    ) -> tuple[NativeLayers, NativeLayers | None]:
        """The layer; of a wide head, its MLP and its attention."""
        config, own = head.config, cast(Any, head.layers[0])
        same = torch.full((products[0].inputs,), _GAIN)
        after, eps, size = own.post_attention_layernorm.weight.detach(), config.norm_eps, config.head_dim
        groups, scale, width = (config.heads, config.key_heads), size**-0.5, config.width
        behind = torch.ones(2 * width) if config.wide else after
        whole = NativeLayer(tuple(products), (same, behind), (_EPSILON, eps, eps), groups, size, scale, head_norm)
        if not config.wide:
            return self._hold(NativeLayers([whole])), None
        second = NativeLayer(tuple(products), (torch.ones(width), after), (eps, eps, 0.0), groups, size, scale)
        return self._hold(NativeLayers([mlp_alone(second)])), self._hold(NativeLayers([attention_alone(whole)]))

    def _last(self, head: Chain, last: PackedWeight) -> CHead:
        """The last norm and the head's product."""
        config = head.config
        if config.kind == "eagle":
            return CHead(last.described, self._weights(torch.full((config.width,), _GAIN)), _EPSILON)
        return CHead(last.described, self._weights(head.norm.weight), config.norm_eps)

    @classmethod
    def of(
        cls, head: Chain, forward: HeadForward, last: Linear, ropes: RopeTables, target: Target
    ) -> NativeChain | None:
        """The head in the library; None where the library cannot run it."""
        config, fc, own = head.config, forward.fc, cast(Any, forward.layers[0])
        if config.layers > 1 or not runs(forward.spec):
            return None
        if config.width != config.hidden_size and not (config.wide and config.fused):
            return None  # the target's hidden states are no states of this head
        if not packed(forward) or not (fc is None or isinstance(fc, PackedWeight)):
            return None
        out = own.out
        if config.wide:  # it adds to the second half of the stream
            weight, bias = own.out.unpack(), own.out.bias
            out = PackedWeight(
                torch.cat((torch.zeros_like(weight), weight)), None if bias is None else torch.cat((0 * bias, bias))
            )
        products = [own.qkv, out, own.mlp.gate_up, own.mlp.down]
        dtype = out.dtype
        return cls(
            head,
            products,
            fc,
            packed_head(config, last, target, dtype),
            forward,
            ropes,
            embedding_rows(head, target, dtype),
        )

    def guess(
        self,
        step: StepInput,
        brought: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]],
        embedded: torch.Tensor | None,
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Logits [N, d] behind the ``wanted`` rows, and their hidden states [N, W] for the next level.

        Where the library does not compute logits, they are None, and the hidden states are those before the last norm.

        Args:
            step: T rows; their keys and values are stored.
            brought: per sequence, hidden states of the target [T', taps x D] for its first rows, and of the head
                itself [T", W] for the others.
            embedded: [T, W] the rows' embeddings, unless the library ``embeds``.
            wanted: row numbers.
        """
        states = torch.empty(step.rows, self._config.width, dtype=self.dtype, device=HOST)
        sources, places, held, first = array("Q"), array("q"), list[torch.Tensor](), 0
        for features, own in brought:
            if features is not None:
                held.append(features.to("cpu", self.dtype).contiguous())
                begin, each, count = held[-1].data_ptr(), self.features * self.dtype.itemsize, len(features)
                sources.extend(range(begin, begin + count * each, each // self.taps))
                places.extend(range(first, first + count))
                first += count
            if own is not None:
                states[first : first + len(own)] = own
                first += len(own)
        told, kept = described_rows(step, self.turns(step.end))
        tokens = step.ids
        told.tokens = place_of(tokens)
        logits = (
            None if self._outputs is None else torch.empty(len(wanted), self._outputs, dtype=self.dtype, device=HOST)
        )
        onward = torch.empty(len(wanted), self._config.width, dtype=self.dtype, device=HOST)
        embedded = None if embedded is None else embedded.contiguous()
        library().specdec_run_chain(
            byref(self.described),
            byref(told),
            address_of(embedded),
            sources.buffer_info()[0],
            places.buffer_info()[0],
            len(places),
            states.data_ptr(),
            (c_int64 * len(wanted))(*wanted),
            len(wanted),
            address_of(logits),
            onward.data_ptr(),
            torch.get_num_threads(),
        )
        del kept, held  # the library has read them
        return logits, onward
