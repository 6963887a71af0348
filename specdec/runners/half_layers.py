"""Half layers: a layer's attention without its MLP, or its MLP without its attention.

A drafter that leaves out parts of a model runs them (:mod:`drafters.layer_skip`). They are copies of the model's
layers, with the same weights, in which a part that adds zeros stands for the one that is left out: a module that gives
zeros, or in native layers a part as narrow as the library takes, whose weights are zeros.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from specdec.runners.choice import RunnerMaker
from specdec.runners.known_layers import UnknownModule
from specdec.runners.layers import LayerByLayer, ModuleLayer
from specdec.runners.linear import PackedWeight
from specdec.runners.native import NativeRunner
from specdec.runners.native_layers import NativeLayer, Reading
from specdec.step.block import Block, Rows
from specdec.step.cache import KVCache, LayerSpec

__all__ = ["HalfLayer", "Part", "half_layers", "native_half_layers"]

_NARROW = 16  # the least width of a head and of an MLP that native layers take
Part = Literal["attention", "mlp"]
_NAMES: dict[Part, tuple[str, ...]] = {
    "attention": ("self_attn", "attention", "attn"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
}


class _Zeros(nn.Module):
    """A part that adds nothing to its input; an attention gives its weights as well."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._pair = part == "attention"

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        zeros = torch.zeros_like(hidden_states)
        return (zeros, None) if self._pair else zeros


class HalfLayer(ModuleLayer):
    """A layer ``without`` one of its parts.

    Raises:
        UnknownModule: the layer has no such part, or a forward or hooks that a user or a library put there.
    """

    def __init__(self, layer: Any, kind: str | None, cache_argument: str, *, without: Part) -> None:
        self._attends = without == "mlp"
        super().__init__(_without(layer, without), kind, cache_argument)

    def _call(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        return super()._call(hidden, given) if self._attends else self._layer(hidden, **given)


def _without(layer: nn.Module, part: Part) -> nn.Module:
    name = next((name for name in _NAMES[part] if layer._modules.get(name) is not None), None)
    if name is None:
        raise UnknownModule(f"a {type(layer).__name__} has no part called {' or '.join(_NAMES[part])}")
    if "forward" in layer.__dict__ or layer._forward_hooks or layer._forward_pre_hooks:
        raise UnknownModule(f"a {type(layer).__name__} has hooks, or a forward of its own")
    made: nn.Module = object.__new__(type(layer))
    object.__setattr__(made, "__dict__", {**layer.__dict__, "_modules": {**layer._modules, name: _Zeros(part)}})
    return made


def half_layers(maker: RunnerMaker, without: Part) -> LayerByLayer | None:
    """A runner of a model's layers without one of their parts, by their own modules; None where that cannot be."""
    try:
        layers = [maker.module_layer(number, HalfLayer, without=without) for number in range(len(maker.layers))]
    except UnknownModule:
        return None
    return maker.of_layers("transformers", [*layers], [])


def native_half_layers(runner: NativeRunner, without: Part) -> NativeRunner:
    """A runner of native layers without one of their parts."""
    first = runner.layers[0]
    size, dtype = len(first.norms[0]), first.products[0].dtype

    def zeros(outputs: int, inputs: int) -> PackedWeight:
        return PackedWeight(torch.zeros(outputs, inputs, dtype=dtype))

    if without == "mlp":
        gate_up, down = zeros(2 * _NARROW, size), zeros(size, _NARROW)
        made = [replace(own, products=(*own.products[:2], gate_up, down), experts=None) for own in runner.layers]
        return runner.of(made)
    narrow: dict[str, Any] = {"heads": (1, 1), "head_dim": _NARROW, "head_norm": None, "cap": 0.0, "rotary_table": 0}
    qkv, out = zeros(3 * _NARROW, size), zeros(size, _NARROW)
    made = [replace(own, products=(qkv, out, *own.products[2:]), **narrow) for own in runner.layers]
    return _WithoutAttention.around(runner, made, dtype)


class _WithoutAttention(NativeRunner):
    """Native layers whose narrow attention looks at zeros, and stores zeros in a cache of its own."""

    _specs: list[LayerSpec]

    @classmethod
    def around(cls, runner: NativeRunner, layers: list[NativeLayer], dtype: torch.dtype) -> _WithoutAttention:
        made = object.__new__(cls)
        made.__dict__ = runner.of(layers).__dict__
        made._specs = [LayerSpec(1, _NARROW, _NARROW, None, torch.device("cpu"), dtype)] * len(layers)
        return made

    def run(
        self,
        hidden: torch.Tensor | None,
        block: Rows,
        first: int,
        last: int,
        taps: Collection[int],
        reading: Reading | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        alone = Block(KVCache(self._specs, capacity=block.rows, rows=block.rows), [0] * block.rows)
        angles = torch.zeros(block.rows, _NARROW)
        return self._native.run(hidden, alone, angles, angles, first, last, taps)
