"""The weights of a drafter's decoder layers, in the form that layers multiply by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specdec.decoder.names import DECODER
from specdec.decoder.spec import Attention, Layer, Norm
from specdec.execute.layer import GatedWeights, LayerWeights
from specdec.execute.norm import RmsNorm
from specdec.runners.linear import DenseLinear, LinearKernel
from specdec.step.step_io import Part

__all__ = ["LiveProduct", "Make", "layer_weights", "product_of"]

Make = Callable[[torch.Tensor, torch.Tensor | None], LinearKernel]
"""From a weight [out, in] and a bias [out] to their product."""


class LiveProduct(DenseLinear):
    """A product by live parameters, in training; under autocast the residual keeps its precision."""

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)


def layer_weights(
    own: Layer,
    tensors: Mapping[str, torch.Tensor],
    number: int,
    make: Make,
    *,
    parts: Part = Part.BOTH,
    names: Mapping[str, tuple[str, ...]] = DECODER,
) -> LayerWeights:
    """Those of layer ``number`` with a gated MLP.

    Args:
        own: what the layer computes.
        tensors: by name; those of live parameters have gradients, so that all of it is made anew in each forward.
        number: of the layer, in its names.
        make: makes products, in the layout that drafting or training reads.
        parts: those that the layer has.
        names: what each part of a layer is called, see :mod:`specdec.decoder.names`.
    """

    def name(part: str) -> str:
        return names[part][0].format(layer=number)

    def norm(spec: Norm | None, part: str) -> RmsNorm | None:
        return None if spec is None else RmsNorm(spec, tensors[f"{name(part)}.weight"])

    def product(*of: str) -> LinearKernel:
        return product_of(tensors, make, *map(name, of))

    first = second = qkv = out = heads = mlp = None
    if parts & Part.ATTENTION:
        first, out = norm(own.before[0], "before.attention"), product("attention.o")
        qkv = product("attention.q", "attention.k", "attention.v")
        if own.attention.qk_norm is not None:
            query, key = (tensors[f"{name(f'attention.{one}_norm')}.weight"] for one in "qk")
            heads = _of_heads(own.attention, query, key)
    if parts & Part.MLP:
        second, mlp = (
            norm(own.before[1], "before.mlp"),
            GatedWeights(product("mlp.gate", "mlp.up"), product("mlp.down")),
        )
    return LayerWeights((first, second), None, qkv, out, heads, mlp)


def product_of(tensors: Mapping[str, torch.Tensor], make: Make, *names: str) -> LinearKernel:
    """One product for linears with the same input; one's tensors are not copied."""
    weights = [tensors[f"{name}.weight"] for name in names]
    biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    if len(weights) == 1:
        return make(weights[0], biases[0] if biases else None)
    return make(torch.cat(weights), torch.cat(biases) if biases else None)


def _of_heads(own: Attention, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[H + G, 1, d] what each head of queries and of keys is multiplied by when it is normed."""
    return torch.stack([query] * own.heads + [key] * own.kv_heads).unsqueeze(1)
