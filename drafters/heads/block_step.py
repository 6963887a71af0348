"""Running a DFlash head: blocks of masks behind the texts of one or several sequences.

The text has no queries: each layer computes its keys and values from the target's hidden states. The rows of a
block attend to the whole text and to each other, to later rows as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from drafters.heads.config import BlockConfig
from drafters.heads.layers import LayerStep, Linear, embedding_of, normed, product, rotary_of, specs_of
from drafters.heads.native_block import NativeBlock
from drafters.heads.weights import Block as BlockWeights
from specdec.runners.attention import attend_all
from specdec.runners.linear import linear_kernel
from specdec.step.batched_rows import rows_of
from specdec.step.block import Block, Rows
from specdec.target import Target

__all__ = ["Blank", "BlockStep", "Sequel"]


@dataclass(frozen=True, slots=True, eq=False)
class Blank:
    """A sequence's input to a pass of the head.

    Attributes:
        block: T rows of text that the head lacks, then the rows of a block; their tokens are not read.
        features: [T, taps x D] hidden states of the target for the rows of text.
        root: the last token, with which the block begins.
    """

    block: Block
    features: torch.Tensor
    root: int


@dataclass(frozen=True, slots=True, eq=False)
class Sequel:
    """A pass's result, for each token of a block: ``hidden`` [B, W] behind the last norm, and ``logits`` [B, d]."""

    hidden: torch.Tensor
    logits: torch.Tensor


class BlockStep:
    """A head's weights in the layout that drafting uses.

    Args:
        head: the head's modules; not needed afterwards.
        target_head: the target's head, over the draft vocabulary if there is one; unused if the head has its own.
        target: the target, whose embedding is used unless the head has its own.
        drafted: number of tokens to draft from a block; the block's other rows are run too, as in training.

    Attributes:
        config: the head's config.
        native: the head in the native library; None where torch runs it.
        specs: what each layer caches.
        weights: number of weights that a pass reads.
    """

    def __init__(self, head: BlockWeights, target_head: Linear, target: Target, drafted: int) -> None:
        self.config = config = head.config
        like = next(head.layers.parameters())
        self.device, self.dtype = like.device, like.dtype
        self._embed, self._fc = embedding_of(head, target), product(head.fc)
        self._head = linear_kernel(head.lm_head.weight.detach()) if config.own_head else target_head
        layers: list[Any] = [*head.layers]
        self._rotary = rotary_of(config, self.device)
        self.native = NativeBlock.of(head, self._fc, self._head, self._rotary, target)
        self._layers = [] if self.native is not None else [LayerStep(layer, config) for layer in layers]
        self._norms = [
            (layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()) for layer in layers
        ]
        self._convolutions = [
            tuple(
                _Convolution(getattr(layer, part), config) if config.conv_kernel else _Plain()
                for part in ("attention_conv", "mlp_conv")
            )
            for layer in layers
        ]
        self._hidden_norm, self._norm = head.hidden_norm.weight.detach(), head.norm.weight.detach()
        self.specs = specs_of(config, self.device, self.dtype, windows=False)
        first = 0 if config.from_anchor else 1
        self._wanted = range(first, first + drafted)
        size = (config.draft_vocab or config.vocab_size) * config.width
        self.weights = size + sum(weight.numel() for weight in head.layers.parameters())

    def _context(self, features: torch.Tensor) -> torch.Tensor:
        """[T, W] states from which keys and values of the text are computed."""
        return normed(self._fc(features.to(self.device, self.dtype)), self._hidden_norm, self.config.norm_eps)

    @torch.no_grad()
    def absorb(self, block: Block, features: torch.Tensor) -> None:
        """Store keys and values of the next rows of text."""
        if self.native is not None:
            self.native.absorb(block, features)
            return
        context = self._context(features)
        cos, _, signed_sin = self._rotary.look_up(block, context)
        for place, layer in enumerate(self._layers):
            block.store(*layer.keys_values(context, (cos, signed_sin)), place)

    @torch.no_grad()
    def run(self, brought: Sequence[Blank]) -> list[Sequel]:
        """Run the blocks of several sequences; keys and values of all rows are stored."""
        size, native = self.config.block_size, self.native
        masks = [self.config.mask_token] * (size - 1)
        tokens = [token for one in brought for token in (one.root, *masks)]
        wanted = [first + row for first in range(0, len(tokens), size) for row in self._wanted]
        if native is not None:
            caches, features = [one.block.cache for one in brought], [one.features for one in brought]
            last, logits = native.run(
                caches, features, tokens, None if native.embeds else self._embedded(tokens), wanted
            )
        else:
            last, logits = self._run(brought, self._embedded(tokens))[wanted], None
        if logits is None:
            last = normed(last, self._norm, self.config.norm_eps)
            logits = self._head(last)
        each = len(self._wanted)
        return [Sequel(*pair) for pair in zip(torch.split(last, each), torch.split(logits, each), strict=True)]

    def _embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._embed(tokens).to(self.device, self.dtype)

    def _run(self, brought: Sequence[Blank], hidden: torch.Tensor) -> torch.Tensor:
        """[N, W] states of the blocks' rows, whose embeddings are ``hidden``, before the last norm."""
        config, rows = self.config, rows_of([one.block for one in brought])
        sizes = [len(one.features) for one in brought]
        context = torch.split(self._context(torch.cat([one.features for one in brought])), sizes)
        cos, _, signed_sin = self._rotary.look_up(rows, hidden)
        masked = [row for _, _, last in rows.parts for row in range(last - config.block_size, last)]
        own, all_rows = (cos[masked], signed_sin[masked]), (cos, signed_sin)
        for place, (layer, (before, after)) in enumerate(zip(self._layers, self._norms, strict=True)):
            attention, mlp = self._convolutions[place]
            inputs, kernels = attention.prepared(normed(hidden, before, config.norm_eps))
            parts = zip(context, torch.split(inputs, config.block_size), strict=True)
            keyed = torch.cat([part for both in parts for part in both])
            rows.store(*layer.keys_values(keyed, all_rows), place)
            found = self._attended(layer.queries(inputs, own), rows, place)
            hidden = hidden + attention.finished(layer.attended(found), kernels)
            inputs, kernels = mlp.prepared(normed(hidden, after, config.norm_eps))
            hidden = hidden + mlp.finished(layer.mlp(inputs), kernels)
        return hidden

    def _attended(self, queries: torch.Tensor, rows: Rows, place: int) -> torch.Tensor:
        """[1, Hq, N, d] the attention outputs of the blocks' rows, for as many queries."""
        found = []
        for own, (block, _, _) in zip(torch.split(queries, self.config.block_size, 2), rows.parts, strict=True):
            end = block.length + block.rows
            keys, values = (store[place].narrow(2, 0, end) for store in (block.cache.keys, block.cache.values))
            if self.config.window(place) is None:
                found.append(attend_all(own, keys, values))
            else:
                mask = self._mask(place, end)
                grouped = keys.shape[1] != own.shape[1]
                found.append(F.scaled_dot_product_attention(own, keys, values, attn_mask=mask, enable_gqa=grouped))
        return torch.cat(found, 2)

    def _mask(self, place: int, end: int) -> torch.Tensor:
        """[B, end] bool, the attention mask of a block's rows, the last of ``end`` positions, with a window."""
        first, last = torch.tensor(self.config.spans(place, end), device=self.device)[..., None].unbind(1)
        places = torch.arange(end, device=self.device)
        return (places >= first) & (places < last)


class _Plain:
    """A layer part without convolutions: its inputs and outputs are unchanged."""

    def prepared(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, inputs

    def finished(self, outputs: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        return outputs


class _Convolution(_Plain):
    """Causal convolutions over a block's rows, whose kernels depend on the row."""

    def __init__(self, weights: Any, config: BlockConfig) -> None:
        self._base, self._projection = weights.base_kernel.detach(), product(weights.kernel_projection)
        self._taps, self._group, self._rows = config.conv_kernel, config.conv_group, config.block_size

    def prepared(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, W] convolved inputs of a layer's part, and kernels [N, taps, groups] for its outputs."""
        kernels = self._projection(inputs).view(len(inputs), 2, self._taps, -1)
        return self._convolved(inputs, kernels[:, 0], self._base[0]), kernels[:, 1]

    def finished(self, outputs: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """[N, W] the convolved outputs of a layer's part."""
        return self._convolved(outputs, kernels, self._base[1])

    def _convolved(self, rows: torch.Tensor, kernels: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(-1, self._rows, rows.shape[-1])
        weights = base + kernels.repeat_interleave(self._group, -1)  # [N, taps, W]
        weights = weights.view(-1, self._rows, *weights.shape[1:])
        total = blocks * weights[:, :, 0]
        for tap in range(1, self._taps):
            total[:, tap:] += blocks[:, :-tap] * weights[:, tap:, tap]
        return total.view(rows.shape)
