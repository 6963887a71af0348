"""RMS norms in torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from specdec.decoder.spec import Norm

__all__ = ["RmsNorm", "normed_heads"]

_FULL = (torch.float32, torch.float64)


class RmsNorm:
    """An RMS norm over the last dimension.

    On a CPU in full precision it is four operations; torch's own is one call made of nine. A norm whose weight has an
    offset multiplies in full precision, and rounds once.

    Args:
        norm: which.
        weight: [D] as checkpoints have it, without the offset.

    Attributes:
        norm: as given.
        by: [D] what it multiplies by; with an offset, in full precision.
    """

    def __init__(self, norm: Norm, weight: torch.Tensor) -> None:
        self.norm, self._rounds_once = norm, norm.offset != 0.0
        by = weight.to(torch.promote_types(weight.dtype, torch.float32)) + norm.offset if norm.offset else weight
        self.by = by
        self._lean = weight.device.type == "cpu" and weight.dtype in _FULL
        if self._lean:
            # x w / sqrt(|x|^2 / D + e) = x (w sqrt D) / hypot(|x|, sqrt(D e))
            size = by.shape[0]
            self._scaled = by * math.sqrt(size)
            self._floor = torch.tensor(math.sqrt(size * norm.eps), dtype=by.dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] normed over the last dimension."""
        if self._lean:
            length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
            normed: torch.Tensor = (hidden * self._scaled).div_(length.hypot(self._floor))
            return normed
        if self._rounds_once:
            return F.rms_norm(hidden.float(), self.by.shape, self.by, self.norm.eps).to(hidden.dtype)
        return F.rms_norm(hidden, self.by.shape, self.by, self.norm.eps)


def normed_heads(heads: torch.Tensor, norm: Norm, by: torch.Tensor) -> torch.Tensor:
    """Heads [..., H, T, d], each normed and multiplied by [H, 1, d], which has the norm's offset already."""
    if by.dtype is heads.dtype:
        return F.rms_norm(heads, heads.shape[-1:], None, norm.eps) * by
    return (F.rms_norm(heads.to(by.dtype), heads.shape[-1:], None, norm.eps) * by).to(heads.dtype)
