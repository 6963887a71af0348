"""Lowered layers: the same text, the same weights, and the original where a layer is not what its class says."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from specdec import Engine, TransformersTarget
from specdec.errors import ConfigError
from specdec.lowering import LoweredLayer, lower
from tests import models

LOWERED = ("llama", "mistral", "qwen2", "qwen3")


def lowered_layers(target: TransformersTarget) -> int:
    return sum(isinstance(layer, LoweredLayer) for layer in target._layers)


@pytest.mark.parametrize("attention", ["sdpa", "split"])
@pytest.mark.parametrize("family", LOWERED)
def test_text_is_that_of_generate(family: str, attention: str) -> None:
    model = models.new_model(family)
    prompt = models.prompt_of(11)
    expected = models.reference(model, prompt, 60)
    target = TransformersTarget(model, attention=attention, optimize="auto")
    assert lowered_layers(target) == target.num_layers
    for drafter in ("none", "prompt_lookup", {"name": "lookahead", "window": 5, "ngram": 5, "guesses": 5}):
        assert Engine(target, drafter=drafter).generate(prompt, 60).token_ids == expected
    assert models.reference(model, prompt, 60) == expected, "the model itself must go on working"


def test_biases_take_part() -> None:
    model = models.new_model("llama", attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    prompt = models.prompt_of(7)
    target = TransformersTarget(model, optimize="auto")
    assert lowered_layers(target) == target.num_layers
    assert Engine(target).generate(prompt, 40).token_ids == models.reference(model, prompt, 40)


def test_no_weight_is_held_twice(tmp_path: Path) -> None:
    model = models.new_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    TransformersTarget(model, optimize="auto")
    attention = model.model.layers[0].self_attn
    storage = attention.q_proj.weight.untyped_storage()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == storage.data_ptr()
    heads = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert storage.nbytes() == sum(part.weight.nbytes for part in heads)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    assert all(torch.equal(before[name], loaded[name]) for name in before)


class Odd(nn.Linear):
    """A linear that is not one, as quantised layers are."""


def _with_hook(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda *_: None)


def _with_odd_linear(layer: Any) -> None:
    layer.mlp.up_proj.__class__ = Odd


def _with_other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


@pytest.mark.parametrize("change", [_with_hook, _with_odd_linear, _with_other_activation])
def test_special_layers_stay(change: Any) -> None:
    layer = models.new_model("llama").model.layers[0]
    assert lower(layer) is not None
    change(layer)
    assert lower(layer) is None


def test_other_classes_stay() -> None:
    target = TransformersTarget(models.new_model("gemma2"), optimize="auto")
    assert lowered_layers(target) == 0


def test_a_layer_that_differs_falls_back_with_a_warning() -> None:
    model = models.new_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda hidden: 2 * type(mlp).forward(mlp, hidden)  # what no class check can see
    with pytest.warns(UserWarning, match=r"layer 1 \(LlamaDecoderLayer\) differs by"):
        target = TransformersTarget(model, optimize="auto")
    assert lowered_layers(target) == target.num_layers - 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompt = models.prompt_of(7)
        assert Engine(target).generate(prompt, 30).token_ids == models.reference(model, prompt, 30)


def test_unknown_choice() -> None:
    with pytest.raises(ConfigError, match="optimize='fast' is unknown; choose auto or off"):
        TransformersTarget(models.new_model("llama"), optimize="fast")
