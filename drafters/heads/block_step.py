"""Running a DFlash head: blocks of masks behind the texts of one or several sequences.

The text has no queries: each layer computes its keys and values from the target's hidden states. The rows of a
block attend to the whole text and to each other, to later rows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from drafters.heads.config import BlockConfig
from drafters.heads.layers import LayerStep, Linear, Norm, embedding_of, normed, product, rotary_of, specs_of
from drafters.heads.native_block import NativeBlock
from drafters.heads.recorded_block import RecordedBlock
from drafters.heads.weights import Block as BlockWeights
from specdec.runners.attention import attend_all
from specdec.runners.linear import Tokens, linear_kernel
from specdec.runners.rows import Rows, TextRows
from specdec.runners.sent_rows import rows_on
from specdec.runners.visibility import bucket
from specdec.step.cache import KVCache
from specdec.step.joining import joined
from specdec.step.step_io import StepInput
from specdec.target import Target

__all__ = ["Blank", "BlockStep", "Sequel"]


@dataclass(frozen=True, slots=True, eq=False)
class Blank:
    """A sequence's input to a pass of the head.

    Attributes:
        step: T rows of text that the head lacks, whose tokens are not read, then the rows of a block.
        features: [T, taps x D] hidden states of the target for the rows of text.
    """

    step: StepInput
    features: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sequel:
    """A pass's result.

    Attributes:
        hidden: [B, W] for each token of a block the state behind the last norm.
        logits: [B, d] of these tokens.
        rows: all rows, where they are on a device of its own; else None.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    rows: TextRows | None = None


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
        recorded: its pass as a graph on a CUDA device; None where it is launched operation by operation.
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
        recording = target.recording if self._layers else None
        self.recorded: RecordedBlock | None = None
        if recording is not None and RecordedBlock.fits(config):
            parts: Any = {"context": self._context, "through": self._through, "ends": self._ends}
            self.recorded = RecordedBlock(config, recording, self._rotary, **parts)
        size = (config.draft_vocab or config.vocab_size) * config.width
        self.weights = size + sum(weight.numel() for weight in head.layers.parameters())

    def warm_up(self, sequences: int) -> None:
        """Record the passes of up to ``sequences`` sequences beforehand."""
        if self.recorded is None:
            return
        size, most = self.config.block_size, self.recorded.most
        caches = [KVCache(self.specs, capacity=most, rows=most) for _ in range(bucket(sequences))]
        width = self.config.hidden_size * len(self.config.taps)
        for rows in {bucket(size + 1): size + 1, bucket(most): most}.values():
            features = torch.zeros(rows - size, width, dtype=self.dtype, device=self.device)
            for count in (1 << power for power in range(len(caches).bit_length())):
                self.run([Blank(StepInput.of(own, [0] * rows), features) for own in caches[:count]])

    def _context(self, features: torch.Tensor, norm: Norm = normed) -> torch.Tensor:
        """[T, W] states from which keys and values of the text are computed."""
        return norm(self._fc(features.to(self.device, self.dtype)), self._hidden_norm, self.config.norm_eps)

    @torch.no_grad()
    def absorb(self, step: StepInput, features: torch.Tensor) -> None:
        """Store keys and values of the next rows of text."""
        if self.native is not None:
            self.native.absorb(step, features)
            return
        context, rows = self._context(features), rows_on(self.device, step)
        cos, _, signed_sin = self._rotary.look_up(rows, context)
        for place, layer in enumerate(self._layers):
            rows.store(*layer.keys_values(context, (cos, signed_sin)), place)

    @torch.no_grad()
    def run(self, brought: Sequence[Blank]) -> list[Sequel]:
        """Run the blocks of several sequences; keys and values of all rows are stored."""
        if self.native is not None:
            pairs = zip(*(torch.split(part, len(self._wanted)) for part in self._by_library(brought)), strict=True)
            return [Sequel(*pair) for pair in pairs]
        rows = rows_on(self.device, joined([one.step for one in brought]))
        each = [torch.split(part, len(self._wanted)) for part in self._by_torch(rows, brought)]
        return [Sequel(*own) for own in zip(*each, rows.there, strict=True)]

    def tokens(self, root: int) -> list[int]:
        """Those of a block."""
        return [root, *[self.config.mask_token] * (self.config.block_size - 1)]

    def _by_library(self, brought: Sequence[Blank]) -> tuple[torch.Tensor, torch.Tensor]:
        """States behind the last norm [N, W], and logits [N, d], of the drafted rows of all blocks."""
        assert self.native is not None
        tokens = [token for one in brought for token in one.step.ids[-self.config.block_size :].tolist()]
        wanted = [first + row for first in range(0, len(tokens), self.config.block_size) for row in self._wanted]
        caches, features = [one.step.texts[0] for one in brought], [one.features for one in brought]
        embedded = None if self.native.embeds else self._embedded(tokens)
        last, logits = self.native.run(caches, features, tokens, embedded, wanted)
        return self._ends(last) if logits is None else (last, logits)

    def _by_torch(self, rows: Rows, brought: Sequence[Blank]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same; by a recorded pass, where there is one. Rows are sliced, as an index would cost a copy."""
        size = self.config.block_size
        if self.recorded is not None:
            features = [one.features for one in brought]
            found = self.recorded.run(rows, features, self._embedded(rows.tokens[0]))
            if found is not None:
                states, logits = (self._drafted(_joined(part, rows, size)) for part in found)
                return states, logits
        hidden = self._embedded(_joined(rows.tokens[0], rows, size))
        return self._ends(self._drafted(self._run(rows, brought, hidden)))

    def _drafted(self, blocks: torch.Tensor) -> torch.Tensor:
        """The drafted rows among those of all blocks [rows, ...]."""
        first, last = self._wanted.start, self._wanted.stop
        return torch.cat([part[first:last] for part in torch.split(blocks, self.config.block_size)])

    def _ends(self, hidden: torch.Tensor, norm: Norm = normed) -> tuple[torch.Tensor, torch.Tensor]:
        """States behind the last norm, and logits, of those before it [N, W]."""
        last = norm(hidden, self._norm, self.config.norm_eps)
        return last, self._head(last)

    def _embedded(self, tokens: Tokens | torch.Tensor) -> torch.Tensor:
        return self._embed(tokens).to(self.device, self.dtype)

    def _run(self, rows: Rows, brought: Sequence[Blank], hidden: torch.Tensor) -> torch.Tensor:
        """[N, W] states of the blocks' rows, whose embeddings are ``hidden``, before the last norm."""
        size = self.config.block_size
        sizes = [len(one.features) for one in brought]
        context = torch.split(self._context(torch.cat([one.features for one in brought])), sizes)
        cos, _, signed_sin = self._rotary.look_up(rows, hidden)
        own, all_rows = [_joined(values, rows, size) for values in (cos, signed_sin)], (cos, signed_sin)

        def attended(place: int, layer: LayerStep, inputs: torch.Tensor) -> torch.Tensor:
            parts = zip(context, torch.split(inputs, size), strict=True)
            keyed = torch.cat([part for both in parts for part in both])
            rows.store(*layer.keys_values(keyed, all_rows), place)
            return layer.attended(self._attended(layer.queries(inputs, own), rows, place))

        return self._through(hidden, attended)

    def _through(
        self,
        hidden: torch.Tensor,
        attended: Callable[[int, LayerStep, torch.Tensor], torch.Tensor],
        norm: Norm = normed,
    ) -> torch.Tensor:
        """[N, W] states behind the layers.

        ``attended``: what a layer's attention adds, [N, W], by its place, the layer and its inputs.
        """
        eps = self.config.norm_eps
        for place, (layer, (before, after)) in enumerate(zip(self._layers, self._norms, strict=True)):
            attention, mlp = self._convolutions[place]
            inputs, kernels = attention.prepared(norm(hidden, before, eps))
            hidden = hidden + attention.finished(attended(place, layer, inputs), kernels)
            inputs, kernels = mlp.prepared(norm(hidden, after, eps))
            hidden = hidden + mlp.finished(layer.mlp(inputs), kernels)
        return hidden

    def _attended(self, queries: torch.Tensor, rows: Rows, place: int) -> torch.Tensor:
        """[1, Hq, N, d] the attention outputs of the blocks' rows, for as many queries."""
        found = []
        for own, part in zip(torch.split(queries, self.config.block_size, 2), rows.parts, strict=True):
            end = part.length + part.rows
            keys, values = (store[place].narrow(2, 0, end) for store in (part.cache.keys, part.cache.values))
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


def _joined(every: torch.Tensor, rows: Rows, size: int) -> torch.Tensor:
    """The last ``size`` rows of each sequence, of all rows [T, ...]."""
    parts = [every[part.ends - size : part.ends] for part in rows.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
