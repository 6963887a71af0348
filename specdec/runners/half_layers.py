"""Half layers: a layer's attention without its MLP, or its MLP without its attention.

A drafter that leaves out parts of a model runs them (:mod:`drafters.layer_skip`). They are copies of the model's
layers, with the same weights, in which a part that adds zeros stands for the one that is left out: a module that gives
zeros, or in native layers a part as narrow as the library takes, whose weights are zeros.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from specdec.runners.choice import RunnerMaker
from specdec.runners.known_layers import UnknownModule, hooks_in
from specdec.runners.layers import LayerByLayer, ModuleLayer
from specdec.runners.linear import PackedWeight
from specdec.runners.native import NativeRunner
from specdec.runners.native_layers import NativeLayer, Reading
from specdec.runners.rows import Rows
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.step_io import StepInput
from specdec.step.torch_switches import HOST

__all__ = ["Beside", "HalfLayer", "Without", "attention_alone", "half_layers", "mlp_alone", "native_half_layers"]

_NARROW = 16  # the least width of a head and of an MLP that native layers take
Without = Literal["attention", "mlp"]
_NAMES: dict[Without, tuple[str, ...]] = {
    "attention": ("self_attn", "attention", "attn"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe"),
}


class _Zeros(nn.Module):
    """A part that adds nothing to its input; an attention gives its weights as well."""

    def __init__(self, part: Without) -> None:
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

    def __init__(self, layer: Any, kind: str | None, cache_argument: str, *, without: Without) -> None:
        self._attends = without == "mlp"
        super().__init__(_without(layer, without), kind, cache_argument)

    def _call(self, hidden: torch.Tensor, given: dict[str, Any]) -> Any:
        return super()._call(hidden, given) if self._attends else self._layer(hidden, **given)


def _without(layer: nn.Module, part: Without) -> nn.Module:
    name = next((name for name in _NAMES[part] if layer._modules.get(name) is not None), None)
    if name is None:
        raise UnknownModule(f"a {type(layer).__name__} has no part called {' or '.join(_NAMES[part])}")
    if "forward" in layer.__dict__ or hooks_in(layer._forward_hooks) or hooks_in(layer._forward_pre_hooks):
        raise UnknownModule(f"a {type(layer).__name__} has hooks, or a forward of its own")
    made: nn.Module = object.__new__(type(layer))
    object.__setattr__(made, "__dict__", {**layer.__dict__, "_modules": {**layer._modules, name: _Zeros(part)}})
    return made


def half_layers(maker: RunnerMaker, without: Without) -> LayerByLayer | None:
    """A runner of a model's layers without one of their parts, by their own modules; None where that cannot be."""
    try:
        layers = [maker.module_layer(number, HalfLayer, without=without) for number in range(len(maker.layers))]
    except UnknownModule:
        return None
    return maker.of_layers("half layers", [*layers], [])


def native_half_layers(runner: NativeRunner, without: Without) -> NativeRunner:
    """A runner of native layers without one of their parts."""
    if without == "mlp":
        return runner.of([attention_alone(layer) for layer in runner.layers])
    made = _WithoutAttention.__new__(_WithoutAttention)
    made.__dict__ = runner.of([mlp_alone(layer) for layer in runner.layers]).__dict__
    made._beside = Beside(len(runner.layers), runner.layers[0].products[0].dtype)
    return made


def attention_alone(layer: NativeLayer) -> NativeLayer:
    """A native layer whose MLP is narrow and adds zeros."""
    size, dtype = len(layer.norms[0]), layer.products[0].dtype
    gate_up, down = _zeros(2 * _NARROW, size, dtype), _zeros(size, _NARROW, dtype)
    return replace(layer, products=(*layer.products[:2], gate_up, down), experts=None)


def mlp_alone(layer: NativeLayer) -> NativeLayer:
    """A native layer whose attention is narrow and adds zeros; it runs on the rows of a :class:`Beside`."""
    size, dtype = len(layer.norms[0]), layer.products[0].dtype
    products = (_zeros(3 * _NARROW, size, dtype), _zeros(size, _NARROW, dtype), *layer.products[2:])
    narrow: dict[str, Any] = {"heads": (1, 1), "head_dim": _NARROW, "head_norm": None, "cap": 0.0, "rotary_table": 0}
    return replace(layer, products=products, **narrow)


@cache
def _zeros(outputs: int, inputs: int, dtype: torch.dtype) -> PackedWeight:
    return PackedWeight(torch.zeros(outputs, inputs, dtype=dtype, device=HOST))


class Beside:
    """Rows of zeros in a cache of their own, for a narrow attention that adds zeros."""

    def __init__(self, layers: int, dtype: torch.dtype) -> None:
        self._specs = [LayerSpec(1, _NARROW, _NARROW, None, torch.device("cpu"), dtype)] * layers
        self._made = dict[int, tuple[StepInput, torch.Tensor]]()

    def rows(self, count: int) -> tuple[StepInput, torch.Tensor]:
        """A forward of ``count`` rows, and their rotary positions [count, d]."""
        if count not in self._made:
            cache = KVCache(self._specs, capacity=count, rows=count)
            angles = torch.zeros(count, _NARROW, dtype=torch.float32, device=HOST)
            self._made[count] = StepInput.of(cache, [0] * count), angles
        return self._made[count]


class _WithoutAttention(NativeRunner):
    """Native layers of MLPs alone."""

    _beside: Beside

    def run(
        self,
        hidden: torch.Tensor | None,
        rows: Rows,
        first: int,
        last: int,
        taps: Collection[int],
        reading: Reading | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        alone, angles = self._beside.rows(rows.rows)
        return self._native.run(hidden, alone, angles, angles, first, last, taps)
