"""Norms in torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from specdec.decoder.spec import Norm
from specdec.step import device_copies

__all__ = ["LayerNorm", "RmsNorm", "normed_heads"]

_FULL, _HALF = (torch.float32, torch.float64), (torch.bfloat16, torch.float16)


class RmsNorm:
    """An RMS norm over the last dimension.

    On a CPU in full precision it is four operations; torch's own is one call made of nine. A norm whose weight has an
    offset multiplies in full precision, and rounds once, as the modules of its families do. A half-precision norm may
    also round before it multiplies, as heads' authors do; in training its rows may be so while its weight is not.

    Args:
        norm: which.
        weight: [D] as checkpoints have it, without the offset.

    Attributes:
        norm: as given.
        by: [D] what it multiplies by; with an offset, in full precision.
    """

    def __init__(self, norm: Norm, weight: torch.Tensor) -> None:
        self.norm, self._rounds_once = norm, norm.offset != 0.0
        self.by = weight if not self._rounds_once else _full(weight) + norm.offset
        lean = weight.dtype in _FULL and not device_copies.is_apart(weight.device)
        self._lean = lean and not self._rounds_once
        if self._lean:
            # x w / sqrt(|x|^2 / D + e) = x (w sqrt D) / hypot(|x|, sqrt(D e))
            size = weight.shape[0]
            self._scaled = weight * math.sqrt(size)
            self._floor = torch.tensor(math.sqrt(size * norm.eps), dtype=weight.dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] normed over the last dimension."""
        if self.norm.rounds_first and hidden.dtype in _HALF:
            return self.by * _rounded(hidden, self.norm.eps)
        if self._lean:
            length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
            normed: torch.Tensor = (hidden * self._scaled).div_(length.hypot(self._floor))
            return normed
        if self._rounds_once:
            whole = _full(hidden)
            root = torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + self.norm.eps)
            return (whole * root * self.by).to(hidden.dtype)
        return F.rms_norm(hidden, self.by.shape, self.by, self.norm.eps)


class LayerNorm:
    """A norm over the last dimension that takes the mean off first; ``weight``, ``bias``: [D]."""

    def __init__(self, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.norm, self.by, self._bias = norm, weight, bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] normed over the last dimension."""
        return F.layer_norm(hidden, self.by.shape, self.by, self._bias, self.norm.eps)


def _full(values: torch.Tensor) -> torch.Tensor:
    """The values in float32 or more."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _rounded(values: torch.Tensor, eps: float) -> torch.Tensor:
    """Half-precision values normed in float32, and rounded."""
    return F.rms_norm(values.float(), values.shape[-1:], None, eps).to(values.dtype)


def normed_heads(heads: torch.Tensor, norm: Norm, by: torch.Tensor) -> torch.Tensor:
    """Heads [..., H, T, d], each normed and multiplied by [H, 1, d], which has the norm's offset already."""
    if norm.centred:
        return F.layer_norm(heads, heads.shape[-1:], None, None, norm.eps) * by
    if norm.rounds_first and heads.dtype in _HALF:
        return by * _rounded(heads, norm.eps)
    if by.dtype is heads.dtype:
        return F.rms_norm(heads, heads.shape[-1:], None, norm.eps) * by
    return (F.rms_norm(heads.to(by.dtype), heads.shape[-1:], None, norm.eps) * by).to(heads.dtype)
