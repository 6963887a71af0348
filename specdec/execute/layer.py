"""One decoder layer in torch, which targets, heads and training share.

It is a third of the operations that a module has: one product for queries, keys and values and one for gate and up,
lean norms, rotary on queries and keys at once, residuals added by the product itself. What its rows see, and where
their keys and values go, is the caller's: it gives the attention as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from specdec.decoder.rope import Angles, rotate
from specdec.decoder.spec import Attention, Experts, Layer
from specdec.execute.mlp import ExpertWeights, GatedWeights, PlainWeights, between, by_experts
from specdec.execute.norm import normed_heads
from specdec.runners.linear import DenseLinear, LinearKernel
from specdec.step import device_copies
from specdec.step.step_io import Part

__all__ = [
    "APART",
    "ByRow",
    "ExpertWeights",
    "GatedWeights",
    "LayerWeights",
    "Mix",
    "PlainWeights",
    "attention",
    "heads_of",
    "keys_values",
    "layer",
    "layer_around",
]

Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries [1, H, T, d], and the rows' own keys and values [1, G, T, d] -> attention of each row [1, H, T, d]."""

ByRow = Callable[[torch.Tensor], torch.Tensor]
"""[T, D] -> [T, D], such as :class:`specdec.execute.norm.RmsNorm`."""


def _same(rows: torch.Tensor) -> torch.Tensor:
    return rows


APART: tuple[ByRow, ByRow] = (_same, _same)
"""``LayerWeights.after`` of layers whose products are rounded before they are added, and are no part of the sum.

So do heads, as their authors' code does, and training, whose residual keeps its precision under autocast.
"""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """What a layer multiplies by; a part that never runs has none.

    Attributes:
        before: norms of what mixer and MLP read, or whatever else comes before them, a convolution in a norm's place;
            None where they read rows as they are.
        after: the same of what they add, where the layer has these.
        qkv: queries, keys and values in one product; of a convolution its two gates and what they are between.
        out: after the mixer.
        heads: [H + G, 1, d] norms of queries and keys, offset included, where the layer has these.
        mlp: of one MLP, or of experts.
        taps: [W, D] of a convolution, the oldest first, and its bias [D], if it has one.
        sinks: [H] scores that no key has, where the layer has these.
    """

    before: tuple[ByRow | None, ByRow | None]
    after: tuple[ByRow, ByRow] | None
    qkv: LinearKernel | None
    out: LinearKernel | None
    heads: torch.Tensor | None
    mlp: GatedWeights | PlainWeights | ExpertWeights | None
    taps: tuple[torch.Tensor, torch.Tensor | None] | None = None
    sinks: torch.Tensor | None = None


def layer(
    spec: Layer,
    weights: LayerWeights,
    hidden: torch.Tensor,
    angles: Angles,
    mix: Mix,
    parts: Part = Part.BOTH,
    *,
    wanted: Sequence[int] | None = None,
) -> torch.Tensor:
    """[T, D] rows through a layer that has attention, or through these of its parts.

    Args:
        spec: what it computes.
        weights: by what.
        hidden: [T, D].
        angles: rotary positions [T, d].
        mix: attention.
        parts: what runs.
        wanted: the N rows that go on, for which ``mix`` gives [1, H, N, d]; the others are only attended to.
    """
    own: Any = spec.mixer
    attend = partial(attention, own, weights, angles=angles, mix=mix)
    return layer_around(spec, weights, hidden, attend, parts, wanted=wanted)


def layer_around(
    spec: Layer,
    weights: LayerWeights,
    hidden: torch.Tensor,
    attend: ByRow,
    parts: Part = Part.BOTH,
    *,
    reads: torch.Tensor | None = None,
    wanted: Sequence[int] | None = None,
) -> torch.Tensor:
    """As :func:`layer`, for attention that is not of these rows alone, whose kernels turn heads by themselves, or for
    another mixer.

    ``attend``: from what queries, keys and values are made of [T, I] to the attention of the rows that go on [N, H d].
    """
    before, (first, second), every = hidden, weights.before, parts is Part.BOTH  # flags are slow to take apart
    if every or parts & Part.ATTENTION:
        assert weights.out is not None
        if reads is None:
            reads = hidden if first is None else first(hidden)
        mixed = attend(reads)
        if wanted is not None:
            hidden = before = device_copies.pick(hidden, wanted)
        hidden = _added(weights.out, mixed, hidden, weights.after and weights.after[0], spec.scale)
    if every or parts & Part.MLP:
        norm, rows = (first, before) if spec.parallel else (second, hidden)
        normed = rows if norm is None else norm(rows)
        own, after = weights.mlp, weights.after and weights.after[1]
        if isinstance(spec.mlp, Experts):
            mixed = by_experts(spec.mlp, own, normed)
            return hidden + _scaled(mixed if after is None else after(mixed), spec.scale)
        assert isinstance(own, GatedWeights | PlainWeights)
        hidden = _added(own.down, between(spec.mlp.act, own, normed), hidden, after, spec.scale)
    return hidden


def _added(
    product: LinearKernel, rows: torch.Tensor, hidden: torch.Tensor, after: ByRow | None, scale: float
) -> torch.Tensor:
    """``hidden`` plus the product, which may be normed."""
    if after is None and scale == 1.0:
        return product.add(rows, hidden)
    return hidden + _scaled(product(rows) if after is None else after(product(rows)), scale)


def _scaled(values: torch.Tensor, scale: float) -> torch.Tensor:
    return values if scale == 1.0 else values * scale


def attention(own: Attention, weights: LayerWeights, reads: torch.Tensor, angles: Angles, mix: Mix) -> torch.Tensor:
    """[N, H d] what attention gives, for rows [T, I]."""
    mixed = mix(*heads_of(own, weights, reads, angles))
    return mixed.transpose(1, 2).flatten(2)[0]


def heads_of(
    own: Attention, weights: LayerWeights, reads: torch.Tensor, angles: Angles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [1, H, T, d], and keys and values [1, G, T, d], at their positions, of rows [T, I]."""
    assert weights.qkv is not None
    turned, values = _turned(own, weights.qkv(reads), own.heads + own.kv_heads, weights.heads, angles)
    return turned[:, : own.heads], turned[:, own.heads :], values


def keys_values(
    own: Attention, weights: LayerWeights, reads: torch.Tensor, angles: Angles
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows that have no queries; a packed product computes these all the same."""
    if not isinstance(weights.qkv, DenseLinear):
        return heads_of(own, weights, reads, angles)[1:]
    product, queries = weights.qkv, own.heads * own.head_dim
    bias = None if product.bias is None else product.bias[queries:]
    by = None if weights.heads is None else weights.heads[own.heads :]
    return _turned(own, F.linear(reads, product.weight[queries:], bias), own.kv_heads, by, angles)


def _turned(
    own: Attention, found: torch.Tensor, turning: int, by: torch.Tensor | None, angles: Angles
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``turning`` heads [1, ., T, d] of rows [T, . d], normed and at their positions; and the other heads."""
    heads = found.view(1, found.shape[0], -1, own.head_dim).transpose(1, 2)
    turned = heads[:, :turning]
    if by is not None and own.norms_after:
        return _normed(own, rotate(turned, angles), by), heads[:, turning:]
    return rotate(turned if by is None else _normed(own, turned, by), angles), heads[:, turning:]


def _normed(own: Attention, heads: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Queries and keys [1, H + G, T, d], or keys, normed: each head by itself, or all of each kind."""
    assert own.qk_norm is not None
    if not own.norms_all:
        return normed_heads(heads, own.qk_norm, by)
    found = []
    sizes = [heads.shape[1] - own.kv_heads, own.kv_heads]
    for some, its in zip(torch.split(heads, sizes, 1), torch.split(by, sizes), strict=True):
        rows = some.transpose(1, 2).flatten(-2)  # [1, T, heads d]
        whole = F.rms_norm(rows, rows.shape[-1:], its.flatten(), own.qk_norm.eps)
        found.append(whole.view(1, len(rows[0]), -1, own.head_dim).transpose(1, 2))
    return torch.cat(found, 1)
