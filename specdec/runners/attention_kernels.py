"""Attention kernels: each over some keys, with the log-sum-exp of its scores, by which parts are merged."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from specdec.errors import ConfigError, first_line

__all__ = ["FLASH", "cpu_flash", "flash_attn", "merge", "plain_attention", "torch_flash"]

_FLASH_ATTN = (2, 8)  # the least release that is known to return what is asked of it here

PartialAttention = tuple[torch.Tensor, torch.Tensor]  # output [1, Hq, T, D], log-sum-exp [1, Hq, T]


def merge(parts: list[PartialAttention]) -> PartialAttention:
    """Join attention over disjoint sets of keys by the log-sum-exp of their scores."""
    output, total = parts[0]
    for part, weight in parts[1:]:
        share = torch.sigmoid(weight - total).unsqueeze(-1)  # e^w / (e^t + e^w)
        output = torch.lerp(output.to(share.dtype), part.to(share.dtype), share)
        total = torch.logaddexp(total, weight)
    return output, total


class Kernel(Protocol):
    """Attention over keys that every row sees, with the log-sum-exp of the scores."""

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, /, **options: Any
    ) -> PartialAttention: ...


def torch_flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, /, *, causal: bool = False, **_: Any
) -> PartialAttention:
    """Torch's flash kernel. ``causal``: the last row sees all keys, the one before all but the last, and so on."""
    output, weight, *_rest = torch.ops.aten._scaled_dot_product_flash_attention(
        query, keys, values, 0.0, causal, False, scale=scale
    )
    return output, weight


def _package_flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, /, *, causal: bool = False, **_: Any
) -> PartialAttention:
    """flash-attn's kernel, as ``torch_flash``."""
    q, k, v = (x.transpose(1, 2) for x in (query, keys, values))  # [1, rows, heads, D]
    output, weight, _rest = flash_attn()(q, k, v, softmax_scale=scale, causal=causal, return_attn_probs=True)
    return output.transpose(1, 2), weight


FLASH: dict[str, Kernel] = {"auto": torch_flash, "flash": _package_flash}
"""The flash kernel that each backend takes on a CUDA device."""


@cache
def flash_attn() -> Callable[..., Any]:
    """flash-attn's function.

    Raises:
        ConfigError: it is not installed, or too old.
    """
    least = ".".join(map(str, _FLASH_ATTN))
    try:
        version = importlib.metadata.version("flash-attn")
        function: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_func
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"attention='flash' needs flash-attn {least} or newer, which cannot be imported: {first_line(error)}; "
            "install specdec with the extra 'flash', or leave attention at auto"
        ) from error
    if tuple(int(part) for part in version.split(".")[:2]) < _FLASH_ATTN:
        raise ConfigError(f"attention='flash' needs flash-attn {least} or newer, and {version} is installed")
    return function


def cpu_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    **_: Any,
) -> PartialAttention:
    """Torch's flash kernel for CPUs, which also returns the log-sum-exp."""
    output, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, causal, attn_mask=mask, scale=scale
    )
    return output, weight


def plain_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> PartialAttention:
    """Matrix products and a softmax, for soft-capped scores and small masked parts; scores are [Hkv, G * T, S]."""
    heads, rows = keys.shape[1], query.shape[2]
    group = query.shape[1] // heads
    folded = query.reshape(heads, group * rows, -1)
    scores = torch.matmul(folded, keys[0].transpose(1, 2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(heads, group, rows, -1)
    if mask is not None:
        scores = scores + mask
    if scores.dtype != torch.float64:
        scores = scores.float()
    weight = torch.logsumexp(scores, -1, keepdim=True)
    shares = torch.exp(scores - weight).to(values.dtype).view(heads, group * rows, -1)
    output = torch.matmul(shares, values[0])
    return output.view(1, heads * group, rows, -1), weight.view(1, heads * group, rows)
