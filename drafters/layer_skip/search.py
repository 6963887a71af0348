"""Choosing the sublayers to leave out, by the text itself: a knapsack over the weights of each and its effect.

A sublayer whose output is close to its input has little effect (their cosine is near 1). For each of several shares of
time to save, the knapsack takes those with the least effect in total (KnapSpec). Each such draft's agreement with the
target on the text then decides which one to use (SWIFT's measure, arXiv 2410.06916). A row takes as long as its weights
take to read, so numbers of weights stand for times, and the choice is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drafters.layer_skip.forward import Skip
from specdec.step.step_io import NOTHING, Entering, LayerPlan, Part, StepInput, Wanted
from specdec.target import Target

__all__ = ["Choice", "Effect", "best_skip", "choices", "effects", "gain", "layer_weights", "least_change", "share_of"]

_SHARES = (0.25, 0.5, 0.75)  # of the layers' weights
_UNITS = 200  # resolution of the knapsack


@dataclass(frozen=True, slots=True)
class Effect:
    """How much a layer and its parts change their input, 1 - cosine."""

    layer: float
    attention: float
    mlp: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a layer: whether its ``attention`` and its ``mlp`` are left out, its effect, and what it reads."""

    change: float
    weights: float
    attention: bool = False
    mlp: bool = False


def layer_weights(target: Target) -> list[tuple[float, float]]:
    """The number of weights of each layer's attention, and of the rest of it; equal numbers where they are unknown."""
    if target.sublayer_weights:
        return [(float(attention), float(others)) for attention, others in target.sublayer_weights]
    each = target.layer_weights / target.num_layers
    return [(each / 3, each * 2 / 3)] * target.num_layers


def choices(effects: Sequence[Effect], weights: Sequence[tuple[float, float]]) -> list[list[Choice]]:
    """The ways to run each layer, whole first; ``weights``: of each layer's attention, and of the rest of it."""
    return [
        [
            Choice(0.0, attention + mlp),
            Choice(effect.layer, 0.0, True, True),
            Choice(effect.mlp, attention, mlp=True),
            Choice(effect.attention, mlp, attention=True),
        ]
        for effect, (attention, mlp) in zip(effects, weights, strict=True)
    ]


def least_change(layers: Sequence[Sequence[Choice]], saved: float) -> list[Choice]:
    """A choice for each layer: the least total change that saves at least the share ``saved`` of the layers' weights.

    Args:
        layers: each layer's choices, the first of which runs it whole.
        saved: in [0, 1].
    """
    total = sum(own[0].weights for own in layers)
    units = [[max(0, round(_UNITS * (own[0].weights - one.weights) / total)) for one in own] for own in layers]
    wanted = min(round(_UNITS * saved), sum(map(max, units)))
    best: list[tuple[float, tuple[int, ...]] | None] = [
        (0.0, ()),
        *[None] * wanted,
    ]  # by units saved; the last: or more
    for own, sizes in zip(layers, units, strict=True):
        after: list[tuple[float, tuple[int, ...]] | None] = [None] * (wanted + 1)
        for held, former in enumerate(best):
            for number, (one, size) in enumerate(zip(own, sizes, strict=True)):
                if former is None:
                    continue
                place, found = min(wanted, held + size), (former[0] + one.change, (*former[1], number))
                known = after[place]
                if known is None or found < known:
                    after[place] = found
        best = after
    chosen = best[wanted]
    assert chosen is not None
    return [own[number] for own, number in zip(layers, chosen[1], strict=True)]


def gain(agreement: float, cost: float, depth: int) -> float:
    """Tokens per plain step's time, for chains of ``depth`` tokens.

    Each token is right with the chance ``agreement`` and takes ``cost`` plain steps; verified rows are taken as free.
    """
    tokens = sum(agreement**place for place in range(depth + 1))
    return tokens / (1 + depth * cost)


def effects(target: Target, tokens: Sequence[int]) -> tuple[list[Effect], torch.Tensor]:
    """The effects of each layer on a text, and the [T] likeliest next tokens."""
    count, cache = target.num_layers, target.new_cache(capacity=len(tokens), rows=len(tokens))
    found = list[Effect]()
    with target.active():
        output = target.forward(StepInput.of(cache, tokens, wanted=Wanted(hidden=range(count + 1))))
        for layer in range(count):
            given, got = output.hidden[layer], output.hidden[layer + 1]
            attending, entering = LayerPlan(layer + 1, (Part.ATTENTION,) * count), Entering(layer, given)
            between = target.forward(StepInput.of(cache, tokens, plan=attending, wanted=NOTHING, entering=entering)).out
            found.append(Effect(_change(given, got), _change(given, between), _change(between, got)))
        assert output.logits is not None
        return found, output.logits.argmax(-1)


def _change(given: torch.Tensor, got: torch.Tensor) -> float:
    similar = F.cosine_similarity(given.float(), got.to(given.device).float(), -1)
    return max(0.0, 1 - float(similar.mean()))


def best_skip(target: Target, tokens: Sequence[int], depth: int) -> Skip:
    """The sublayers to leave out for a text; the same text and model give the same result."""
    found, likeliest = effects(target, tokens)
    layers = choices(found, layer_weights(target))
    best = Skip(), 0.0
    for share in _SHARES:
        chosen = least_change(layers, share)
        attention, mlp = (
            [layer for layer, one in enumerate(chosen) if getattr(one, part)] for part in ("attention", "mlp")
        )
        skip = Skip.of((), attention, mlp)
        if not 0 < len(attention) + len(mlp) < 2 * target.num_layers:
            continue
        cache = target.new_cache(capacity=len(tokens), rows=len(tokens))
        step = StepInput.of(cache, tokens, plan=skip.plan(target.num_layers))
        with target.active():
            logits = target.forward(step).logits
        assert logits is not None
        agreement = float((logits.argmax(-1) == likeliest).float().mean())
        if (value := gain(agreement, share_of(target, skip), depth)) > best[1]:
            best = skip, value
    return best[0] or Skip.of([target.num_layers - 1])


def share_of(target: Target, skip: Skip) -> float:
    """The weights that a pass of one row reads without these sublayers, as a share of a plain step's."""
    each, head = layer_weights(target), target.vocab_size * target.hidden_size
    left = sum(
        attention * (layer not in skip.attention) + mlp * (layer not in skip.mlp)
        for layer, (attention, mlp) in enumerate(each)
    )
    return (left + head) / (sum(map(sum, each)) + head)
