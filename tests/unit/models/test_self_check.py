"""The self-check: a model that does with its layers what specdec would not do is not copied, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from specdec import Engine, TransformersTarget
from specdec.errors import TargetError
from tests.models import new_model, prompt_of, reference


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_runs_its_layers_otherwise_is_not_copied(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first one are run in the reverse order, so that nothing but the logits can tell."""
    model: Any = new_model("llama", dtype)
    own = type(model.model).forward

    def otherwise(decoder: Any, *arguments: Any, **options: Any) -> Any:
        layers = decoder.layers
        decoder.layers = nn.ModuleList([layers[0], *reversed(layers[1:])])
        try:
            return own(decoder, *arguments, **options)
        finally:
            decoder.layers = layers

    Engine.from_model(model)
    monkeypatch.setattr(type(model.model), "forward", otherwise)
    with pytest.raises(TargetError, match=r"computes other logits than the model itself: by .* is rounding"):
        Engine.from_model(model)
    prompt = prompt_of(9)
    text = Engine(TransformersTarget(model), drafter="lookahead").generate(prompt, 9).token_ids
    assert text == reference(model, prompt, 9)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_forward_that_heeds_no_mask_is_refused(dtype: torch.dtype) -> None:
    """Its own mask is all that its layers see, so that rows of a tree see each other."""
    model: Any = new_model("llama", dtype)
    forward = model.model.forward
    model.model.forward = lambda *given, **options: forward(*given, **{**options, "attention_mask": None})
    with pytest.raises(TargetError, match=r"own forward over a tree are not those of each path: by .* is rounding"):
        TransformersTarget(model)
