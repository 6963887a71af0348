"""A model's layers and head, lowered one after the other, so that no more than one of them is in memory twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from specdec.lowering.choice import choose_kernels
from specdec.lowering.layer import LoweredHead, LoweredLayer, lower
from specdec.lowering.pages import forget, trim
from specdec.lowering.products import Product

__all__ = ["lower_layers"]


def lower_layers(
    layers: Sequence[nn.Module],
    head: LoweredHead | None,
    *,
    kernels: str,
    owned: bool,
    agrees: Callable[[int, nn.Module, LoweredLayer], bool],
) -> tuple[list[Any], Product | None]:
    """The layers, lean where they are known and agree, on the kernels that suit this machine; and the head's product.

    Args:
        layers: of the model, which from then on reads the lowered layers' weights.
        head: see :func:`specdec.lowering.lower_head`.
        kernels: see :func:`specdec.lowering.choose_kernels`.
        owned: nobody else holds the weights, see :func:`specdec.lowering.products.fuse`.
        agrees: whether a layer, of this number, computes what its lowered one does; one that does not stays.
    """
    lowered: list[LoweredLayer | None] = []
    for layer in layers:
        lean = lower(layer, owned=owned)
        lowered.append(lean)
        if owned and lean is not None:
            forget(*lean.weights)  # the self-check has read them all; they come back layer by layer
        trim()
    if owned and head is not None:
        forget(head.product.weight)
    weights = [weight for lean in lowered if lean is not None for weight in lean.weights]
    chosen = choose_kernels([*weights, *([head.product.weight] if head else [])], kernels)
    del weights
    stored: Product | None = None
    if head is not None:  # the largest of all, before the layers grow
        stored = head.use(chosen.get(tuple(head.product.weight.shape), "linear"), owned=owned)
    found: list[Any] = list(layers)
    for number, lean in enumerate(lowered):
        trim()
        if lean is None:
            continue
        lean.use(chosen)
        if agrees(number, layers[number], lean):
            lean.install()
            found[number] = lean
    trim()
    return found, stored
