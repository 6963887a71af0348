"""What stands before and behind a CUDA device's layers where it is plain: embedding, last norm and head."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn

from specdec.runners.cuts import ChosenCuts, weight_of
from specdec.runners.known_layers import is_known_norm, why_special

__all__ = ["Head", "Norm", "any_rows", "is_plain_embedding", "why_ends_special"]


def is_plain_embedding(embedding: nn.Module, gain: torch.Tensor) -> bool:
    """Whether nothing but its weight's rows are embeddings; ``gain``: of a layer's norm."""
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None or why_special(embedding) is not None:
        return False
    weight = embedding.weight
    return (weight.dtype, weight.device) == (gain.dtype, gain.device) and weight.is_contiguous()


def why_ends_special(norm: nn.Module, head: nn.Module, gain: torch.Tensor) -> str | None:
    """Why the last norm and the head are left to their modules, or None; ``gain``: of a layer's norm."""
    if not is_known_norm(norm):
        return f"the last norm is a {type(norm).__name__}, which its own module computes"
    if type(head) is not nn.Linear or (special := why_special(head)) is not None:
        return f"the head ({type(head).__name__}) {special if type(head) is nn.Linear else 'is no plain linear layer'}"
    weights: list[Any] = [norm.weight, head.weight]
    if any((weight.dtype, weight.device) != (gain.dtype, gain.device) for weight in weights):
        return "the last norm or the head is in another dtype, or on another device, than the layers"
    return None


class Norm:
    """A plain RMS norm of rows of any shape [..., D]."""

    def __init__(self, kernels: ModuleType, norm: Any) -> None:
        self._kernels, self.weight, self.epsilon = kernels, norm.weight.data, norm.variance_epsilon

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        normed: torch.Tensor = self._kernels.add_norm(rows, None, self.weight, self.epsilon)[1]
        return normed.view(hidden.shape)


class Head:
    """A plain head, [..., D] to [..., V]."""

    def __init__(self, kernels: ModuleType, head: nn.Linear, cuts: ChosenCuts) -> None:
        self._kernels, self.weight, self._cuts = kernels, head.weight.data, cuts
        self.bias = None if head.bias is None else head.bias.data

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        cuts = self._cuts.of(weight_of(self.weight))
        logits: torch.Tensor = self._kernels.product(rows, self.weight, self.bias, cuts=cuts, whole=True)
        return logits.view(*hidden.shape[:-1], -1)


def any_rows(count: int, like: torch.Tensor) -> torch.Tensor:
    """Rows [count, in] for a weight [out, in], of numbers of many sizes; torch's own generators give none of them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, like.shape[1], generator=generator)
    sizes = torch.randint(-6, 3, rows.shape, generator=generator)
    return torch.ldexp(rows, sizes).to(like)
