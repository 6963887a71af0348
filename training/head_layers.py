"""A head's layers on whole texts with gradients; :mod:`drafters.heads.layers` computes the same row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from drafters.heads.config import HeadConfig
from drafters.heads.layers import normed, rotary_of
from specdec.runners.rotary import rotate, signed

__all__ = ["Angles", "HeadLayer", "attend", "rotations"]

Angles = tuple[torch.Tensor, torch.Tensor]  # [N, 1, d] cosines, and sines whose first half is negated


def rotations(config: HeadConfig, positions: torch.Tensor, like: torch.Tensor) -> Angles:
    """The rotary positions of N rows at ``positions`` [N], in the dtype of ``like``."""
    cos, sin = rotary_of(config, positions.device).module(like, positions[None])
    return cos[0][:, None], signed(sin[0])[:, None]


class HeadLayer:
    """One layer of a head; it uses the module's own weights.

    Args:
        layer: :class:`drafters.heads.weights.Layer`.
        config: the head's config.
    """

    def __init__(self, layer: nn.Module, config: HeadConfig) -> None:
        own: Any = layer
        self._attention, self._mlp, self._after = own.self_attn, own.mlp, own.post_attention_layernorm
        self._config, self._activation = config, ACT2FN[config.activation]

    def queries(self, inputs: torch.Tensor, angles: Angles) -> torch.Tensor:
        """[N, Hq, d] the rotated queries of ``inputs`` [N, ...]."""
        return rotate(self._split(self._attention.q_proj(inputs), "q_norm"), *angles)

    def keys_values(self, inputs: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, [N, Hk, d] each."""
        keys = rotate(self._split(self._attention.k_proj(inputs), "k_norm"), *angles)
        return keys, self._split(self._attention.v_proj(inputs))

    def finished(self, residual: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """[N, W] the layer's output, from its attention outputs [N, Hq, d]."""
        residual = residual + self._attention.o_proj(found.flatten(1))
        inputs = normed(residual, self._after.weight, self._config.norm_eps)
        mlp = self._mlp
        return residual + mlp.down_proj(self._activation(mlp.gate_proj(inputs)) * mlp.up_proj(inputs))

    def _split(self, states: torch.Tensor, norm: str = "") -> torch.Tensor:
        heads = states.view(len(states), -1, self._config.head_dim)
        if norm and self._config.qk_norm:
            return normed(heads, getattr(self._attention, norm).weight, self._config.norm_eps)
        return heads


def attend(
    queries: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor] | None,
    seen: torch.Tensor,
    counts: Sequence[int],
) -> torch.Tensor:
    """[N, Hq, d] attention of rows over their windows' texts and the rows that were drafted beside them.

    Args:
        queries: [N, Hq, d], rows of the first window first.
        text: keys and values of the windows' rows, [B, L, Hk, d] each.
        own: keys and values that each row sees beside the text, [N, S, Hk, d] each; or None.
        seen: [N, L] bool, what each row sees of its window's text.
        counts: number of rows in each window.
    """
    keys, values = text
    groups = queries.shape[1] // keys.shape[2]
    queries = queries.unflatten(1, (-1, groups)) * queries.shape[-1] ** -0.5  # [N, Hk, g, d]
    found, first = [], 0
    for window, count in enumerate(counts):
        rows = slice(first, first + count)
        first += count
        asked = queries[rows]
        scores = torch.einsum("nkgd,lkd->nkgl", asked, keys[window])
        scores = scores.masked_fill(~seen[rows, None, None], -torch.inf)
        if own is not None:
            scores = torch.cat((scores, torch.einsum("nkgd,nskd->nkgs", asked, own[0][rows])), -1)
        chances = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
        length = keys.shape[1]
        part = torch.einsum("nkgl,lkd->nkgd", chances[..., :length], values[window])
        if own is not None:
            part = part + torch.einsum("nkgs,nskd->nkgd", chances[..., length:], own[1][rows])
        found.append(part.flatten(1, 2))
    return torch.cat(found)
