"""The self-check: a model that does with its layers what specdec would not do is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from specdec import TransformersTarget
from tests.models import new_model


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_runs_its_layers_otherwise_is_not_walked(dtype: torch.dtype) -> None:
    """All but the first one are run in the reverse order, so that nothing but the logits can tell."""
    model: Any = new_model("llama", dtype)
    decoder, layers = model.model, model.model.layers

    class Otherwise(type(decoder)):  # type: ignore[misc]
        def forward(self, *arguments: Any, **options: Any) -> Any:
            self.layers = nn.ModuleList([layers[0], *reversed(layers[1:])])
            try:
                return super().forward(*arguments, **options)
            finally:
                self.layers = layers

    TransformersTarget(model)
    decoder.__class__ = Otherwise
    target = TransformersTarget(model)
    assert target.runner.name == "modules"
    assert re.search(r"the layer walk differs from the model's own forward by .* is rounding", target.plan.reason)
