"""An EAGLE head of one layer in the native library: one call for a pass, or for a whole draft."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof, byref, c_int64
from typing import Any

import torch

from drafters.heads.forward import HeadForward
from drafters.heads.head_step import Linear, embedding_rows
from drafters.heads.native_parts import NativeParts, packed, packed_head, runs
from drafters.heads.weights import Chain
from specdec.decoder.rope import RopeTables
from specdec.execute.native import told_rows
from specdec.execute.native_layers import NativeLayers, address_of
from specdec.native.library import library
from specdec.native.types import CChain, CHead, place_of
from specdec.runners.linear import PackedWeight
from specdec.step.step_io import StepInput
from specdec.step.torch_switches import HOST
from specdec.target import Target

__all__ = ["NativeChain"]


class NativeChain(NativeParts):
    """The weights of a head with one layer, as the library reads them.

    Args:
        head: the head's modules.
        forward: the head, whose products are packed.
        last: the head's last product; None where only its own module computes it.
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
        forward: HeadForward,
        last: PackedWeight | None,
        ropes: RopeTables,
        embedding: PackedWeight | torch.Tensor | None,
    ) -> None:
        spec, fc, own = forward.spec, forward.fc, self._weights
        super().__init__(ropes, spec.layers[0].attention.rope, next(head.layers.parameters()).dtype)
        self._config = config = head.config
        self._outputs = None if last is None else last.outputs
        self.features = config.hidden_size * (len(config.taps) or 1)
        if isinstance(fc, PackedWeight):
            self.features = fc.inputs - (spec.width if spec.fuse == "join" else 0)
        self.taps = self.features // config.hidden_size
        native = self._hold(NativeLayers(spec.layers, forward.layers))
        fused = None if fc is None else addressof(self._hold(fc).described)
        norm: Any = forward.norm
        epsilon = config.norm_eps
        head_of = None if last is None else CHead(last.described, None if norm is None else own(norm), epsilon)
        embedded, hidden = (None, None) if forward.joined is None else map(own, forward.joined)
        self.embeds = embedding is not None
        self.grows = self.embeds and last is not None
        drafted = head.draft_tokens
        self.described = CChain(
            native.shape,
            layer=addressof(native.layers),
            head=None if head_of is None else addressof(self._hold(head_of)),
            fuse=fused if spec.fuse == "fc" else None,
            join=fused if spec.fuse == "join" else None,
            embedding=addressof(embedding.described) if isinstance(embedding, PackedWeight) else None,
            table=address_of(embedding) if isinstance(embedding, torch.Tensor) else None,
            features_norm=own(*forward.inputs) if forward.inputs else None,
            embedded_norm=embedded,
            hidden_norm=hidden,
            drafted=None if drafted is None else self._hold(drafted.long().contiguous()).data_ptr(),
            width=spec.width,
            features=self.features,
            taps=self.taps,
            norms=len(forward.inputs),
            vocabulary=config.vocab_size,
            from_norm=spec.residual == "normed",
            final=spec.onward == "normed",
            epsilon=epsilon,
        )
        self._hold((last, embedding))

    @classmethod
    def of(
        cls, head: Chain, forward: HeadForward, last: Linear, ropes: RopeTables, target: Target
    ) -> NativeChain | None:
        """The head in the library; None where the library cannot run it."""
        config, fc = head.config, forward.fc
        if config.layers > 1 or not runs(forward.spec):
            return None
        if config.width != config.hidden_size and not (config.wide and config.fused):
            return None  # the target's hidden states are no states of this head
        if not packed(forward) or not (fc is None or isinstance(fc, PackedWeight)):
            return None
        dtype = next(head.layers.parameters()).dtype
        return cls(head, forward, packed_head(config, last, target, dtype), ropes, embedding_rows(head, target, dtype))

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
        told, kept = told_rows(step, self.turns)
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
