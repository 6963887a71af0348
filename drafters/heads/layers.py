"""What heads of all kinds take from their own weights or their target's, and what their layers cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from drafters.heads.weights import HeadWeights
from specdec.decoder.head_spec import HeadSpec
from specdec.runners.linear import LinearKernel, PackedWeight, Tokens, linear_kernel
from specdec.step.cache import LayerSpec
from specdec.target import Target

__all__ = ["Linear", "embedding_of", "embedding_rows", "product", "specs_of"]

Linear = Callable[[torch.Tensor], torch.Tensor]


def product(own: nn.Linear) -> LinearKernel:
    """A module's product."""
    return linear_kernel(own.weight.detach(), None if own.bias is None else own.bias.detach())


def specs_of(spec: HeadSpec, device: torch.device, dtype: torch.dtype) -> list[LayerSpec]:
    """What each layer caches."""
    every = [own.attention for own in spec.layers]
    return [LayerSpec(own.kv_heads, own.head_dim, own.head_dim, own.window, device, dtype) for own in every]


def embedding_of(head: HeadWeights, target: Target) -> Callable[[Tokens | torch.Tensor], torch.Tensor]:
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
    """The weight [V, D] that :func:`embedding_of` only looks up, for the native library; None where it does more."""
    found = head.embed_tokens.weight.detach() if head.config.own_embedding else target.embedding_rows
    if found is None or found.dtype is not dtype:
        return None
    if isinstance(found, torch.Tensor) and not (found.device.type == "cpu" and found.is_contiguous()):
        return None
    return found
