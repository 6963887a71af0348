"""What the passes of trained heads share: their result, the head's weights, its embedding and its matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drafters.heads.forward import HeadForward
from drafters.heads.spec import head_spec
from drafters.heads.weights import HeadWeights
from drafters.shared.own_cache import specs_of
from specdec.decoder.rope import Angles, RopeTables
from specdec.runners.linear import LinearKernel, PackedWeight, Tokens, linear_kernel
from specdec.runners.rows import Rows, TextRows
from specdec.target import Target

__all__ = ["Guess", "HeadStep", "Linear", "embedding_rows", "last_rows", "product"]

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """A pass's result.

    Attributes:
        logits: [N, d] behind the asked rows.
        states: [N, W] theirs: what the next level reads, and of a block those behind the last norm.
        rows: all rows, where they are on a device of its own; else None.
    """

    logits: torch.Tensor
    states: torch.Tensor
    rows: TextRows | None = None


class HeadStep:
    """A head's weights in the layout that drafting uses.

    Args:
        head: the head's modules; not needed afterwards.
        target_head: the target's head, over the draft vocabulary if there is one; unused if the head has its own.
        target: the target, whose embedding is used unless the head has its own.

    Attributes:
        config: the head's config.
        specs: what each layer caches.
        weights: number of weights that a pass reads.
    """

    def __init__(self, head: HeadWeights, target_head: Linear, target: Target) -> None:
        self.config = config = head.config
        like = next(head.layers.parameters())
        self.device, self.dtype = like.device, like.dtype
        self._embed = _embedding_of(head, target)
        self._head = linear_kernel(head.lm_head.weight.detach()) if config.own_head else target_head
        self._ropes = RopeTables(self.dtype, self.device)
        self._forward = HeadForward.of(head_spec(config), head.state_dict(), linear_kernel)
        self.specs = specs_of(self._forward.spec.layers, *self._place)
        size = (config.draft_vocab or config.vocab_size) * config.width
        self.weights = size + sum(weight.numel() for weight in head.layers.parameters())

    @property
    def _place(self) -> tuple[torch.device, torch.dtype]:
        return self.device, self.dtype

    def _embedded(self, tokens: Tokens | torch.Tensor) -> torch.Tensor:
        """[T, W] the embeddings of tokens."""
        return self._embed(tokens).to(*self._place)

    @torch.no_grad()
    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """[T, W] the states that the target's hidden states [T, taps x D] come to."""
        return self._forward.fused(features.to(*self._place))

    def _angles(self, rows: Rows) -> Angles:
        return self._ropes.of(self._forward.spec.layers[0].attention.rope, rows)

    def _ends(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [N, d], and the states that go on [N, W], of the stream behind the layers [N, W]."""
        last, onward = self._forward.ends(hidden)
        return self._head(last), onward


def last_rows(every: torch.Tensor, rows: Rows, counts: Sequence[int]) -> torch.Tensor:
    """The last ``counts[i]`` rows of sequence i, taken from all rows [T, ...] by slices.

    An index would cost a copy to a device.
    """
    parts = [every[part.ends - count : part.ends] for part, count in zip(rows.parts, counts, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def product(own: nn.Linear) -> LinearKernel:
    """A module's product."""
    return linear_kernel(own.weight.detach(), None if own.bias is None else own.bias.detach())


def _embedding_of(head: HeadWeights, target: Target) -> Callable[[Tokens | torch.Tensor], torch.Tensor]:
    """The function from tokens [N] to embeddings [N, D]: the head's own embedding, or else the target's.

    Tokens may be a tensor on a device.
    """
    if not head.config.own_embedding:
        return target.embed
    weight = head.embed_tokens.weight.detach()

    def embed(tokens: Tokens | torch.Tensor) -> torch.Tensor:
        if not isinstance(tokens, torch.Tensor):
            tokens = torch.tensor([*tokens], device=weight.device)
        return weight[tokens.to(weight.device)]

    return embed


def embedding_rows(head: HeadWeights, target: Target, dtype: torch.dtype) -> PackedWeight | torch.Tensor | None:
    """The weight [V, D] whose rows are the head's embeddings, for the native library; None where more is done."""
    found = head.embed_tokens.weight.detach() if head.config.own_embedding else target.embedding_rows
    if found is None or found.dtype is not dtype:
        return None
    if isinstance(found, torch.Tensor) and not (PackedWeight.takes(found) and found.is_contiguous()):
        return None
    return found
