"""Native layers of which a part is left out: attention without the MLP behind it, or the MLP alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from specdec.runners.half_layers import NARROW, attention_alone, mlp_alone
from specdec.runners.native_layers import NativeLayer, NativeLayers
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.step_io import Part, StepInput
from specdec.step.torch_switches import HOST

__all__ = ["PartLayers"]


class PartLayers:
    """Layers that share the weights of ``layers``; ``only``: the part that they have."""

    def __init__(self, layers: Sequence[NativeLayer], only: Part, *, gelu: bool) -> None:
        self._attends, self._dtype = only is Part.ATTENTION, layers[0].products[0].dtype
        make = attention_alone if self._attends else mlp_alone
        self._native = NativeLayers([make(layer) for layer in layers], gelu=gelu)
        specs = [LayerSpec(1, NARROW, NARROW, None, HOST, self._dtype)] * len(layers)
        self._beside = cache(lambda count: KVCache(specs, capacity=count, rows=count))

    def run(
        self, hidden: Any, step: StepInput, turns: tuple[torch.Tensor, torch.Tensor], first: int, last: int
    ) -> torch.Tensor:
        """Rows through layers [first, last); ``turns``: cosines and signed sines by position."""
        if self._attends:
            return self._native.run(hidden, step, *turns, first, last, (), by_row=False)[0]
        alone, angles = StepInput.of(self._beside(step.rows), [0] * step.rows), torch.zeros(step.rows, NARROW)
        return self._native.run(hidden, alone, angles, angles, first, last, ())[0]
