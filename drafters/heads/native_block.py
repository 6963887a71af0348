"""A DFlash or DSpark head in the native library: keys and values of text are one call, and so are blocks.

Text has no queries, so its keys and values are one product for all layers. The rows of a block are native layers' rows
that see spans of positions, later rows of the block among them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from typing import Any

import numpy as np
import torch

from drafters.heads.forward import HeadForward
from drafters.heads.head_step import Linear, embedding_rows
from drafters.heads.native_parts import NativeParts, packed, packed_head, runs
from drafters.heads.weights import Block as BlockWeights
from drafters.shared.layer_weights import product_of
from specdec.decoder.rope import RopeTables
from specdec.execute.native import NativeHead, run_layers, told_rows
from specdec.execute.native_layers import NativeLayers
from specdec.native.library import library
from specdec.native.types import CContext
from specdec.runners.linear import PackedWeight, linear_kernel
from specdec.step.cache import KVCache
from specdec.step.joining import joined
from specdec.step.step_io import StepInput
from specdec.target import Target

__all__ = ["NativeBlock"]


class NativeBlock(NativeParts):
    """The weights of a head, as the library reads them.

    Args:
        head: the head's modules.
        forward: the head, whose products are packed.
        keyed: keys and values of all layers, layer by layer.
        last: the product that gives logits; None where only its own module computes them.
        ropes: the head's rotary positions.
        embedding: the embedding's weight; None where only its own module embeds.

    Attributes:
        embeds: whether the library has the embedding; otherwise blocks come with their embeddings.
        outputs: number of logits; None where the library does not compute them.
    """

    def __init__(
        self,
        head: BlockWeights,
        forward: HeadForward,
        keyed: PackedWeight,
        last: PackedWeight | None,
        ropes: RopeTables,
        embedding: PackedWeight | None,
    ) -> None:
        super().__init__(ropes, forward.spec.layers[0].attention.rope, keyed.dtype)
        self._config = config = head.config
        self._embedding, self.embeds = embedding, embedding is not None
        self.outputs = None if last is None else last.outputs
        fc: Any = forward.fc
        last_norm: Any = forward.norm
        self._hold((keyed, fc, last))
        self._layers = NativeLayers(forward.spec.layers, forward.layers)
        norm, eps = self._weights(forward.fused_norm), config.norm_eps
        self._context = CContext(addressof(fc.described), addressof(keyed.described), norm, eps)
        self._head = None if last is None else NativeHead(last_norm.by, eps, last)

    @classmethod
    def of(
        cls, head: BlockWeights, forward: HeadForward, last: Linear, ropes: RopeTables, target: Target
    ) -> NativeBlock | None:
        """The head in the library; None where the library cannot run it."""
        config, fc = head.config, forward.fc
        if config.conv_kernel or not runs(forward.spec) or not isinstance(fc, PackedWeight) or not packed(forward):
            return None
        names = [f"layers.{place}.self_attn.{one}_proj" for place in range(config.layers) for one in "kv"]
        keyed = product_of(head.state_dict(), linear_kernel, *names)
        assert isinstance(keyed, PackedWeight)
        embedding = embedding_rows(head, target, fc.dtype)
        own = embedding if isinstance(embedding, PackedWeight) else None
        return cls(head, forward, keyed, packed_head(config, last, target, fc.dtype), ropes, own)

    def absorb(self, text: StepInput, features: torch.Tensor) -> None:
        """Store keys and values of T rows of text with ``features`` [T, taps x D]."""
        features = features.to("cpu", self.dtype).contiguous()
        told, kept = told_rows(text, self.turns)
        library().specdec_absorb(
            byref(self._layers.shape),
            self._layers.layers,
            byref(self._context),
            byref(told),
            features.data_ptr(),
            torch.get_num_threads(),
        )
        del kept  # the library has read it

    def run(
        self,
        caches: Sequence[KVCache],
        features: Sequence[torch.Tensor],
        tokens: Sequence[int],
        embedded: torch.Tensor | None,
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [N, W] of the ``wanted`` rows behind the last norm, and their logits [N, d].

        Where the library does not compute logits, they are None, and the hidden states are those before the last norm.

        Args:
            caches: of each sequence.
            features: of each sequence [T, taps x D] for T rows of text that its cache lacks.
            tokens: of the rows of all blocks.
            embedded: [rows, W] their embeddings, unless the library ``embeds``.
            wanted: numbers of rows among them.
        """
        size, pairs = self._config.block_size, [*zip(caches, map(len, features), strict=True)]
        text = joined([StepInput.of(cache, range(rows)) for cache, rows in pairs])
        blocks = joined([StepInput.of(cache, range(size), first=rows) for cache, rows in pairs])
        self.absorb(text, features[0] if len(features) == 1 else torch.cat([*features]))
        rows, numbers = told_rows(blocks, self.turns), (c_int64 * len(tokens))(*tokens)
        told, start = rows[0], None
        ends, spans = [cache.length + own + size for cache, own in pairs], array("i")
        for layer in range(self._config.layers):
            for end in ends:
                for span in self._config.spans(layer, end):
                    spans.extend(span)
        told.spans = spans.buffer_info()[0]
        if self._embedding is None:
            assert embedded is not None
            start = embedded
        else:
            told.tokens, told.embedding = addressof(numbers), addressof(self._embedding.described)
        reading = (
            None if self._head is None else self._head.reading(blocks.rows, np.array(wanted, dtype=np.int64), True)
        )
        out, _ = run_layers(self._layers, rows, start, 0, self._config.layers, reading=reading)
        del numbers, spans  # the library has read them
        if reading is None:
            return out[[*wanted]], None
        assert reading.normed is not None
        return reading.normed[[*wanted]], reading.logits
