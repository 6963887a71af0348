"""Choosing the layers to leave out, by the text itself: a knapsack over each layer's cost and its effect.

A layer whose output is close to its input has little effect (their cosine is near 1). For each of several shares of
time to save, the knapsack takes the layers with the least effect in total (KnapSpec, over whole layers). Each such
draft's agreement with the target on the text then decides which one to use (SWIFT's measure, arXiv 2410.06916).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from drafters.layer_skip.forward import SkippedForward
from specdec.step.block import Block
from specdec.target import Target

__all__ = ["best_skip", "gain", "layer_costs", "least_change", "similarities"]

_SHARES = (0.25, 0.5, 0.75)  # of the layers' total time
_UNITS = 200  # resolution of the knapsack


def least_change(changes: Sequence[float], costs: Sequence[float], saved: float) -> frozenset[int]:
    """The layers with the least total change, among all sets that cost at least the share ``saved``.

    Args:
        changes: change of the result when a layer is left out, >= 0, for each layer.
        costs: time of each layer, > 0, in any unit.
        saved: share of the total cost to save, in [0, 1].
    """
    total = sum(costs)
    units = [max(1, round(_UNITS * cost / total)) for cost in costs]
    wanted = min(round(_UNITS * saved), sum(units))
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * wanted]  # by units; the last: or more
    for layer, (change, size) in enumerate(zip(changes, units, strict=True)):
        for held in range(wanted, -1, -1):
            if (own := best[held]) is None:
                continue
            place, found = min(wanted, held + size), (own[0] + change, (*own[1], layer))
            former = best[place]
            if former is None or found < former:
                best[place] = found
    chosen = best[wanted]
    return frozenset() if chosen is None else frozenset(chosen[1])


def gain(agreement: float, cost: float, depth: int) -> float:
    """Tokens per plain step's time, for chains of ``depth`` tokens.

    Each token is right with the chance ``agreement`` and takes ``cost`` plain steps; verified rows are taken as free.
    """
    tokens = sum(agreement**place for place in range(depth + 1))
    return tokens / (1 + depth * cost)


def layer_costs(target: Target) -> list[float]:
    """The cost of each layer: the number of its weights, which bound the time of a step with few rows."""
    layers: Any = getattr(target, "layers", None)
    sizes = [] if layers is None else [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    known = len(sizes) == target.num_layers and all(sizes)
    return [float(size) for size in sizes] if known else [target.layer_weights / target.num_layers] * target.num_layers


def similarities(target: Target, tokens: Sequence[int]) -> tuple[list[float], torch.Tensor]:
    """The mean cosine of each layer's input and output over a text, and the [T] likeliest next tokens."""
    block = Block(target.new_cache(capacity=len(tokens), rows=len(tokens)), tokens, device=target.device,
                  backend=target.backend)  # fmt: skip
    with target.active():
        output = target.forward(block, taps=range(target.num_layers + 1))
        states = [output.taps[layer].float().cpu() for layer in range(target.num_layers + 1)]
        assert output.logits is not None
        chosen = output.logits.argmax(-1)
    return [float(F.cosine_similarity(got, given, -1).mean()) for got, given in pairwise(states)], chosen


def best_skip(target: Target, tokens: Sequence[int], depth: int) -> frozenset[int]:
    """The layers to leave out for a text; the same text and model give the same result, as no time is measured."""
    found, chosen = similarities(target, tokens)
    changes, costs = [max(0.0, 1 - cosine) for cosine in found], layer_costs(target)
    head = float(target.vocab_size * target.hidden_size)
    best = frozenset[int](), 0.0
    for share in _SHARES:
        skip = least_change(changes, costs, share)
        if not 0 < len(skip) < target.num_layers:
            continue
        block = Block(target.new_cache(capacity=len(tokens), rows=len(tokens)), tokens, device=target.device,
                      backend=target.backend)  # fmt: skip
        (logits,) = SkippedForward(target, skip)([block])
        agreement = float((logits.argmax(-1) == chosen).float().mean())
        kept = head + sum(cost for layer, cost in enumerate(costs) if layer not in skip)
        if (value := gain(agreement, kept / (head + sum(costs)), depth)) > best[1]:
            best = skip, value
    return best[0] or frozenset({target.num_layers - 1})
