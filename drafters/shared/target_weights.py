"""The weights of a target's last norm and head, with which new adapters and heads begin."""

from __future__ import annotations

import torch

from specdec.target import Target

__all__ = ["head_weight", "norm_weight"]


def norm_weight(target: Target) -> torch.Tensor:
    """[D] the weight of the last norm, whether it is an RMS norm or a LayerNorm, and however its class stores it.

    Signs in turn have the mean 0 and the size 1, so a norm multiplies them by its weight and adds its bias. Half the
    difference of both results is the weight alone.
    """
    size = target.hidden_size
    signs = 1 - 2 * (torch.arange(size, device=target.head_device) % 2).to(target.dtype)
    plus, minus = target.norm(torch.stack((signs, -signs)))
    weight: torch.Tensor = (plus - minus) / 2 * signs
    return weight


def head_weight(target: Target, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """[V, D] the weight of the head, or [d, D] of its rows for ``tokens`` [d], without a bias that it may add."""
    head = target.head if tokens is None else target.head_of(tokens)
    units = torch.eye(target.hidden_size, dtype=target.dtype, device=target.head_device)
    weight: torch.Tensor = (
        head(units) - head(torch.zeros_like(units[:1]))
    ).T  # the columns are a unit vector's outputs
    return weight
