"""Running a DFlash head: blocks of masks behind the texts of one or several sequences.

The text has no queries: each layer computes its keys and values from the target's hidden states. The rows of a
block attend to the whole text and to each other, to later rows as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from drafters.heads.config import BlockConfig
from drafters.heads.head_step import Guess, HeadStep, Linear, last_rows, product
from drafters.heads.native_block import NativeBlock
from drafters.heads.recorded import RecordedBlock
from drafters.heads.weights import Block
from drafters.shared.own_cache import Nodes
from specdec.execute.layer import ByRow, LayerWeights
from specdec.runners.attention import attend_all
from specdec.runners.rows import Rows, TextRows
from specdec.runners.sent_rows import rows_on
from specdec.runners.visibility import bucket
from specdec.step.cache import KVCache
from specdec.step.joining import joined
from specdec.step.step_io import StepInput
from specdec.target import Target

__all__ = ["BlockStep"]


class BlockStep(HeadStep):
    """A DFlash, DFlash2 or DSpark head that drafts; see HeadStep.

    Args:
        drafted: number of tokens to draft from a block; the block's other rows are run too, as in training.

    Attributes:
        native: the head in the native library; None where torch runs it.
        recorded: its pass as a graph on a CUDA device; None where it is launched operation by operation.
    """

    def __init__(self, head: Block, target_head: Linear, target: Target, drafted: int) -> None:
        super().__init__(head, target_head, target)
        config = self.config
        self._size = config.block_size
        self.native = NativeBlock.of(head, self._forward, self._head, self._ropes, target)
        layers: list[Any] = [*head.layers] if config.conv_kernel else []
        self._convolutions = [
            (_Convolution(layer.attention_conv, config), _Convolution(layer.mlp_conv, config)) for layer in layers
        ]
        first = 0 if config.from_anchor else 1
        self._wanted = range(first, first + drafted)
        recording = target.recording if self.native is None else None
        self.recorded: RecordedBlock | None = None
        if recording is not None and RecordedBlock.fits(config):
            self.recorded = RecordedBlock(self._forward, self._head, recording, self._ropes, self._size)

    def warm_up(self, sequences: int) -> None:
        """Record the passes of up to ``sequences`` sequences beforehand."""
        if self.recorded is None:
            return
        size, most = self._size, self.recorded.most
        caches = [KVCache(self.specs, capacity=most, rows=most) for _ in range(bucket(sequences))]
        width = self.config.hidden_size * len(self.config.taps)
        for rows in {bucket(size + 1): size + 1, bucket(most): most}.values():
            features = torch.zeros(rows - size, width, dtype=self.dtype, device=self.device)
            for count in (1 << power for power in range(len(caches).bit_length())):
                self.guess([Nodes(StepInput.of(own, [0] * rows), features) for own in caches[:count]])

    @torch.no_grad()
    def absorb(self, step: StepInput, features: torch.Tensor) -> None:
        """Store keys and values of the next rows of text."""
        if self.native is not None:
            self.native.absorb(step, features)
            return
        context, rows = self.fused(features), rows_on(self.device, step)
        angles = self._angles(rows)
        for place in range(len(self.specs)):
            rows.store(*self._forward.keys_values(place, context, angles), place)

    @torch.no_grad()
    def guess(self, brought: Sequence[Nodes]) -> list[Guess]:
        """Run the blocks of several sequences; keys and values of all rows are stored."""
        features = [one.features for one in brought if one.features is not None]
        there: Sequence[TextRows | None] = [None] * len(brought)
        if self.native is not None:
            parts = self._by_library(self.native, [one.step for one in brought], features)
        else:
            rows = rows_on(self.device, joined([one.step for one in brought]))
            parts, there = self._by_torch(rows, features), rows.there
        each = [torch.split(part, len(self._wanted)) for part in parts]
        return [Guess(*own) for own in zip(*each, there, strict=True)]

    def tokens(self, root: int) -> list[int]:
        """Those of a block."""
        return [root, *[self.config.mask_token] * (self._size - 1)]

    def _by_library(
        self, native: NativeBlock, steps: Sequence[StepInput], features: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, d] and states behind the last norm [N, W] of the drafted rows of all blocks."""
        tokens = [token for step in steps for token in step.ids[-self._size :].tolist()]
        wanted = [first + row for first in range(0, len(tokens), self._size) for row in self._wanted]
        embedded = None if native.embeds else self._embedded(tokens)
        last, logits = native.run([step.texts[0] for step in steps], features, tokens, embedded, wanted)
        return self._ends(last) if logits is None else (logits, last)

    def _by_torch(self, rows: Rows, features: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The same; by a recorded pass, where there is one."""
        blocks = [self._size] * len(features)
        if self.recorded is not None:
            found = self.recorded.run(rows, features, self._embedded(rows.tokens[0]))
            if found is not None:
                logits, states = (self._drafted(last_rows(part, rows, blocks)) for part in found)
                return logits, states
        hidden = self._embedded(last_rows(rows.tokens[0], rows, blocks))
        return self._ends(self._drafted(self._run(rows, features, hidden)))

    def _drafted(self, blocks: torch.Tensor) -> torch.Tensor:
        """The drafted rows among those of all blocks [rows, ...]; sliced, as an index would cost a copy."""
        first, last = self._wanted.start, self._wanted.stop
        return torch.cat([part[first:last] for part in torch.split(blocks, self._size)])

    def _run(self, rows: Rows, features: Sequence[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """[N, W] states of the blocks' rows, whose embeddings are ``hidden``, before the last norm."""
        context = torch.split(self.fused(torch.cat([*features])), [*map(len, features)])
        angles = self._angles(rows)

        def attend(place: int, inputs: torch.Tensor) -> torch.Tensor:
            parts = zip(context, torch.split(inputs, self._size), strict=True)
            read = torch.cat([part for both in parts for part in both])
            queries, keys, values = self._forward.heads(place, read, angles)
            rows.store(keys, values, place)
            own = torch.cat([queries[:, :, part.ends - self._size : part.ends] for part in rows.parts], 2)
            return self._attended(own, rows, place).transpose(1, 2).flatten(2)[0]

        forward = self._forward
        if self._convolutions:
            pairs = zip(forward.layers, self._convolutions, strict=True)
            forward = replace(forward, layers=tuple(_convolved(*own) for own in pairs))
        return forward.through(hidden, attend)

    def _attended(self, queries: torch.Tensor, rows: Rows, place: int) -> torch.Tensor:
        """[1, Hq, N, d] the attention outputs of the blocks' rows, for as many queries."""
        found = []
        for own, part in zip(torch.split(queries, self._size, 2), rows.parts, strict=True):
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


def _convolved(weights: LayerWeights, convolutions: tuple[_Convolution, _Convolution]) -> LayerWeights:
    """A layer's weights for one pass, with a convolution behind each norm, and one behind what is added."""
    (first, out), (second, down) = (
        own.around(norm) for own, norm in zip(convolutions, weights.before, strict=True) if norm is not None
    )
    return replace(weights, before=(first, second), after=(out, down))


class _Convolution:
    """Causal convolutions over a block's rows, whose kernels depend on the row."""

    def __init__(self, weights: Any, config: BlockConfig) -> None:
        self._base, self._projection = weights.base_kernel.detach(), product(weights.kernel_projection)
        self._taps, self._group, self._rows = config.conv_kernel, config.conv_group, config.block_size

    def around(self, norm: ByRow) -> tuple[ByRow, ByRow]:
        """From rows [N, W] to a part's inputs, and from its outputs to what is added, by kernels that inputs give."""
        kernels = torch.empty(0)

        def before(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal kernels
            inputs = norm(hidden)
            kernels = self._projection(inputs).view(len(inputs), 2, self._taps, -1)
            return self._convolved(inputs, kernels[:, 0], self._base[0])

        return before, lambda outputs: self._convolved(outputs, kernels[:, 1], self._base[1])

    def _convolved(self, rows: torch.Tensor, kernels: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(-1, self._rows, rows.shape[-1])
        weights = base + kernels.repeat_interleave(self._group, -1)  # [N, taps, W]
        weights = weights.view(-1, self._rows, *weights.shape[1:])
        total = blocks * weights[:, :, 0]
        for tap in range(1, self._taps):
            total[:, tap:] += blocks[:, :-tap] * weights[:, tap:, tap]
        return total.view(rows.shape)
