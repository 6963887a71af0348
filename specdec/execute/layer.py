"""One decoder layer in torch, which decoding and training share.

It is a third of the operations that a module has: one product for queries, keys and values and one for gate and up,
lean norms, rotary on queries and keys at once, residuals added by the product itself. What its rows see, and where
their keys and values go, is the caller's: it gives the attention as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specdec.decoder.rope import Angles, rotate
from specdec.decoder.spec import Activation, Attention, Experts, Gated, Layer, Mixer
from specdec.execute.norm import RmsNorm, normed_heads
from specdec.runners.linear import LinearKernel
from specdec.step import device_copies
from specdec.step.step_io import Part

__all__ = ["ExpertWeights", "GatedWeights", "LayerWeights", "Mix", "layer"]

Mix = Callable[..., torch.Tensor]
"""Queries [1, H, T, d], and the rows' own keys and values [1, G, T, d] -> attention of each row [1, H, T, d]. Of a
convolution: inputs [T, D] -> convolved [T, D]."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedWeights:
    """Gate and up in one product, and down."""

    gate_up: LinearKernel
    down: LinearKernel


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """``router``: [D] to a logit for each expert."""

    router: LinearKernel
    each: Sequence[GatedWeights]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """What a layer multiplies by.

    Attributes:
        before: norms of what attention and the MLP read.
        after: norms of what they add, where the layer has these.
        qkv: queries, keys and values in one product; of a convolution its two gates and what they are between.
        out: after the mixer.
        heads: [H + G, 1, d] norms of queries and keys, offset included, where the layer has these.
        mlp: of one MLP, or of experts.
        taps: [W, D] of a convolution, the oldest first, and its bias [D], if it has one.
    """

    before: tuple[RmsNorm, RmsNorm]
    after: tuple[RmsNorm, RmsNorm] | None
    qkv: LinearKernel
    out: LinearKernel
    heads: torch.Tensor | None
    mlp: GatedWeights | ExpertWeights
    taps: tuple[torch.Tensor, torch.Tensor | None] | None = None


def layer(
    spec: Layer,
    weights: LayerWeights,
    hidden: torch.Tensor,
    angles: Angles | None,
    mix: Mix,
    parts: Part = Part.BOTH,
    *,
    reads: torch.Tensor | None = None,
    wanted: Sequence[int] | None = None,
) -> torch.Tensor:
    """[T, D] rows through a layer, or through these of its parts.

    Args:
        spec: what it computes.
        weights: by what.
        hidden: [T, D].
        angles: rotary positions [T, d]; not read by a convolution.
        mix: attention, or the convolution.
        parts: what runs.
        reads: [T, I] what queries, keys and values are made of, where that is not ``hidden`` normed (EAGLE).
        wanted: the N rows that go on, for which ``mix`` gives [1, H, N, d]; the others are only attended to.
    """
    if parts & Part.ATTENTION:
        mixed = _mixed(spec.mixer, weights, weights.before[0](hidden) if reads is None else reads, angles, mix)
        if wanted is not None:
            hidden = device_copies.pick(hidden, wanted)
        hidden = _added(weights.out, mixed, hidden, weights.after and weights.after[0])
    if parts & Part.MLP:
        normed, after = weights.before[1](hidden), weights.after and weights.after[1]
        if isinstance(spec.mlp, Gated):
            own: Any = weights.mlp
            return _added(own.down, _gated(spec.mlp.act, own, normed), hidden, after)
        mixed = _by_experts(spec.mlp, weights.mlp, normed)
        hidden = hidden + (mixed if after is None else after(mixed))
    return hidden


def _added(product: LinearKernel, rows: torch.Tensor, hidden: torch.Tensor, after: RmsNorm | None) -> torch.Tensor:
    """``hidden`` plus the product, which may be normed."""
    return product.add(rows, hidden) if after is None else hidden + after(product(rows))


def _mixed(own: Mixer, weights: LayerWeights, reads: torch.Tensor, angles: Angles | None, mix: Mix) -> torch.Tensor:
    """What attention gives, or a convolution [T, D], for rows [T, I]."""
    if isinstance(own, Attention):
        assert angles is not None
        return _attended(own, weights, reads, angles, mix)
    before, after, inputs = weights.qkv(reads).chunk(3, -1)
    return after * mix(before * inputs)


def _attended(own: Attention, weights: LayerWeights, reads: torch.Tensor, angles: Angles, mix: Mix) -> torch.Tensor:
    """[N, H d] what attention gives, for rows [T, I]."""
    count, turning = reads.shape[0], own.heads + own.kv_heads
    heads = weights.qkv(reads).view(1, count, -1, own.head_dim).transpose(1, 2)  # [1, H + 2 G, T, d]
    turned = heads[:, :turning]
    if weights.heads is not None:
        turned = _normed(own, turned, weights.heads)
    turned = rotate(turned, angles)
    mixed = mix(turned[:, : own.heads], turned[:, own.heads :], heads[:, turning:])
    return mixed.transpose(1, 2).flatten(2)[0]


def _normed(own: Attention, heads: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Queries and keys [1, H + G, T, d] normed, each head by itself, or all of queries and all of keys."""
    assert own.qk_norm is not None
    if not own.norms_all:
        return normed_heads(heads, own.qk_norm, by)
    found = []
    sizes = [own.heads, own.kv_heads]
    for some, its in zip(torch.split(heads, sizes, 1), torch.split(by, sizes), strict=True):
        rows = some.transpose(1, 2).flatten(-2)  # [1, T, heads d]
        whole = F.rms_norm(rows, rows.shape[-1:], its.flatten(), own.qk_norm.eps)
        found.append(whole.view(1, len(rows[0]), -1, own.head_dim).transpose(1, 2))
    return torch.cat(found, 1)


def _gated(act: Activation, weights: GatedWeights, normed: torch.Tensor) -> torch.Tensor:
    """[T, I] what is between gate and up, and down."""
    gate, up = weights.gate_up(normed).chunk(2, -1)
    return (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def _by_experts(spec: Experts, weights: Any, normed: torch.Tensor) -> torch.Tensor:
    """[T, D] the sum of what each row's experts give, by their shares."""
    logits = weights.router(normed)
    shares = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    shares, chosen = shares.topk(spec.chosen, -1)
    if spec.norm:
        shares = shares / shares.sum(-1, keepdim=True)
    total = torch.zeros_like(normed)
    for number in sorted({*chosen.flatten().tolist()}):
        rows, rank = torch.where(chosen == number)
        expert = weights.each[number]
        own = expert.down(_gated(spec.act, expert, normed[rows])) * shares[rows, rank, None]
        total = total.index_add(0, rows, own.to(total.dtype))
    return total
