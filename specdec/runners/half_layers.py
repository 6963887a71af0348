"""Half layers: a native layer's attention without its MLP, or its MLP without its attention.

A part as narrow as the library takes, whose weights are zeros, stands for the one that is left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from specdec.runners.linear import PackedWeight
from specdec.runners.native_layers import NativeLayer
from specdec.step.torch_switches import HOST

__all__ = ["NARROW", "attention_alone", "mlp_alone"]

NARROW = 16  # the least width of a head and of an MLP that native layers take


def attention_alone(layer: NativeLayer) -> NativeLayer:
    """A native layer whose MLP is narrow and adds zeros."""
    size, dtype = len(layer.norms[0]), layer.products[0].dtype
    gate_up, down = _zeros(2 * NARROW, size, dtype), _zeros(size, NARROW, dtype)
    return replace(layer, products=(*layer.products[:2], gate_up, down), experts=None)


def mlp_alone(layer: NativeLayer) -> NativeLayer:
    """A native layer whose attention is narrow and adds zeros."""
    size, dtype = len(layer.norms[0]), layer.products[0].dtype
    products = (_zeros(3 * NARROW, size, dtype), _zeros(size, NARROW, dtype), *layer.products[2:])
    narrow: dict[str, Any] = {"heads": (1, 1), "head_dim": NARROW, "head_norm": None, "cap": 0.0, "rotary_table": 0}
    return replace(layer, products=products, **narrow)


@cache
def _zeros(outputs: int, inputs: int, dtype: torch.dtype) -> PackedWeight:
    return PackedWeight(torch.zeros(outputs, inputs, dtype=dtype, device=HOST))
