"""Activations in torch. On a CPU a row's numbers do not depend on the rows beside it.

Torch computes vectors of values, and those that fill no vector one by one, where it rounds sigmoids, SiLU and GELU
otherwise. Which values these are depends on the number of rows. Its exponential and its error function round all values
alike, and so do sums, products and quotients: so on a CPU activations are made of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from specdec.decoder.spec import Activation
from specdec.step import device_copies

__all__ = ["ACTIVATIONS", "sigmoid"]


def sigmoid(values: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x), rounded once."""
    if _by_torch(values):
        return torch.sigmoid(values)
    return _one_more(_full(values)).reciprocal_().to(values.dtype)


def _silu(values: torch.Tensor) -> torch.Tensor:
    if _by_torch(values):
        return F.silu(values)
    full = _full(values)
    return (full / _one_more(full)).to(values.dtype)


def _gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    """x (1 + tanh u) / 2 = x / (1 + e^-2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if _by_torch(values):
        return F.gelu(values, approximate="tanh")
    full, by = _full(values), 2 * math.sqrt(2 / math.pi)
    return (full / _one_more((full * full).mul_(0.044715 * by).add_(by).mul_(full))).to(values.dtype)


def _gelu(values: torch.Tensor) -> torch.Tensor:
    if _by_torch(values):
        return F.gelu(values)
    full = _full(values)
    return (full * 0.5).mul_(torch.erf(full * math.sqrt(0.5)).add_(1)).to(values.dtype)


def _by_torch(values: torch.Tensor) -> bool:
    """On a device, which computes every value alike, and with gradients, which do not overflow."""
    return values.requires_grad or device_copies.is_apart(values.device)


def _full(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _one_more(values: torch.Tensor) -> torch.Tensor:
    """1 + e^-x."""
    return torch.neg(values).exp_().add_(1)


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "relu": F.relu,
}
