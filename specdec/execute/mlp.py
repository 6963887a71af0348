"""MLPs and mixtures of experts of a layer, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.decoder.spec import Activation, Clamp, Experts, Sigmoid
from specdec.execute.activations import ACTIVATIONS, sigmoid
from specdec.runners.linear import LinearKernel

__all__ = ["ExpertWeights", "GatedWeights", "PlainWeights", "between", "by_experts"]


@dataclass(frozen=True, slots=True, eq=False)
class GatedWeights:
    """Gate and up in one product, and down."""

    gate_up: LinearKernel
    down: LinearKernel


@dataclass(frozen=True, slots=True, eq=False)
class PlainWeights:
    """Up and down."""

    up: LinearKernel
    down: LinearKernel


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Of all experts.

    Attributes:
        router: [D] to a logit for each expert.
        each: of each.
        bias: [E] what is added when experts are chosen by sigmoids, in full precision, as the router then is.
        shared: of the one that each row has, if any.
        shared_gate: [D] to a logit for that one, if its family has one.
    """

    router: LinearKernel
    each: Sequence[GatedWeights]
    bias: torch.Tensor | None = None
    shared: GatedWeights | None = None
    shared_gate: LinearKernel | None = None


def between(act: Activation, weights: GatedWeights | PlainWeights, normed: torch.Tensor) -> torch.Tensor:
    """[T, I] what is between gate and up, and down."""
    if isinstance(weights, PlainWeights):
        return ACTIVATIONS[act](weights.up(normed))
    gate, up = weights.gate_up(normed).chunk(2, -1)
    mixed = ACTIVATIONS[act](gate)
    return mixed * up if mixed.requires_grad else mixed.mul_(up)


def _clamped(own: Clamp, weights: GatedWeights, normed: torch.Tensor) -> torch.Tensor:
    """[T, I] the same of experts whose gate and up are between bounds."""
    gate, up = weights.gate_up(normed).chunk(2, -1)
    gate, up = gate.clamp(max=own.limit), up.clamp(-own.limit, own.limit)
    return gate * sigmoid(gate * own.gain) * (up + 1)


def by_experts(spec: Experts, weights: Any, normed: torch.Tensor) -> torch.Tensor:
    """[T, D] the sum of what each row's experts give, by their shares."""
    if spec.router is None:
        logits = weights.router(normed)
        shares = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        shares, chosen = shares.topk(spec.chosen, -1)
    else:
        shares, chosen = _by_sigmoids(spec.router, spec.chosen, weights, normed)
    if spec.norm:
        shares = shares / shares.sum(-1, keepdim=True)
    if spec.router is not None:
        shares = shares * spec.router.scale
    total = torch.zeros_like(normed) if weights.shared is None else _shared(spec, weights, normed)
    for number in sorted({*chosen.flatten().tolist()}):
        rows, rank = torch.where(chosen == number)
        expert = weights.each[number]
        some = normed[rows]
        inner = between(spec.act, expert, some) if spec.clamp is None else _clamped(spec.clamp, expert, some)
        own = expert.down(inner) * shares[rows, rank, None]
        total = total.index_add(0, rows, own.to(total.dtype))
    return total


def _shared(spec: Experts, weights: ExpertWeights, normed: torch.Tensor) -> torch.Tensor:
    """[T, D] what the expert that each row has gives."""
    assert weights.shared is not None
    found = weights.shared.down(between(spec.act, weights.shared, normed))
    return found if weights.shared_gate is None else sigmoid(weights.shared_gate(normed)) * found


def _by_sigmoids(
    own: Sigmoid, count: int, weights: ExpertWeights, normed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, count] sigmoids of the experts that are chosen, and their numbers."""
    found = sigmoid(weights.router(normed.to(torch.promote_types(normed.dtype, torch.float32))))
    assert weights.bias is not None
    ranked = found + weights.bias
    if own.best < own.groups:
        groups = ranked.view(len(ranked), own.groups, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(own.best, -1).indices
        left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, False)
        ranked = groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).view(ranked.shape)
    chosen = ranked.topk(count, -1).indices
    return found.gather(-1, chosen), chosen
