"""Lowered layers: the same text, the same weights, and the original where a layer is not what its class says."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec import Engine, TransformersTarget
from specdec.errors import ConfigError
from specdec.lowering import LoweredLayer, lower, lower_norm
from specdec.lowering.parts import Part
from specdec.lowering.products import PRODUCTS, Packed
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


@pytest.mark.parametrize("kernels", ["linear", "transposed", "packed"])
@pytest.mark.parametrize("family", LOWERED)
def test_every_kernel_gives_the_same_text(family: str, kernels: str) -> None:
    """In float32, which is as narrow as a packed kernel can be compared in."""
    model, prompt = models.new_model(family, torch.float32), models.prompt_of(11)
    expected = models.reference(model, prompt, 60)
    target = TransformersTarget(model, optimize="auto", kernels=kernels)
    assert lowered_layers(target) == target.num_layers
    assert any(isinstance(module, Part) for module in model.modules()) == (kernels != "linear")
    for drafter in ("none", "prompt_lookup"):
        assert Engine(target, drafter=drafter).generate(prompt, 60).token_ids == expected
    assert models.reference(model, prompt, 60) == expected, "the model itself must go on working"


@pytest.mark.parametrize("kernels", ["transposed", "packed"])
def test_a_repacked_model_saves_and_copies_its_own_weights(kernels: str, tmp_path: Path) -> None:
    model = models.new_model("llama", torch.float32, attention_bias=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = sorted(name for name, _ in model.named_parameters())
    target = TransformersTarget(model, optimize="auto", kernels=kernels)
    assert [name for name, _ in target.named_weights()] == names
    assert all(torch.equal(before[name], weight) for name, weight in target.named_weights())
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for state in (model.state_dict(), saved, target.plain_model().state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(before[name], state[name]) for name in before)


def test_packed_weights_are_held_once() -> None:
    model = models.new_model("llama", torch.float32)
    target = TransformersTarget(model, optimize="auto", kernels="packed")
    left = {name for name, parameter in model.named_parameters() if parameter.ndim == 2}
    assert left == {"model.embed_tokens.weight"}
    plain = target.plain_model()
    assert plain is not model
    assert target.plain_model() is plain
    assert all(type(m) is nn.Linear for m in plain.modules() if hasattr(m, "out_features"))
    assert TransformersTarget(plain).plain_model() is plain


def test_a_tied_head_stays() -> None:
    model = models.new_model("llama", torch.float32, tie_word_embeddings=True)
    TransformersTarget(model, optimize="auto", kernels="packed")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_float64_has_no_packed_kernel() -> None:
    model = models.new_model("llama")
    TransformersTarget(model, optimize="auto", kernels="packed")
    assert not any(isinstance(module, Part) for module in model.modules())


def test_a_packed_layer_that_differs_falls_back_and_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Packed):
        def __call__(self, rows: torch.Tensor) -> torch.Tensor:
            return super().__call__(rows) * 1.1

    monkeypatch.setitem(PRODUCTS, "packed", Wrong)
    model, prompt = models.new_model("llama", torch.float32, tie_word_embeddings=True), models.prompt_of(7)
    expected = models.reference(model, prompt, 30)
    with pytest.warns(UserWarning, match=r"layer \d \(LlamaDecoderLayer\) differs by") as seen:
        target = TransformersTarget(model, optimize="auto", kernels="packed")
    assert len(seen) == target.num_layers
    assert lowered_layers(target) == 0
    assert Engine(target).generate(prompt, 30).token_ids == expected
    assert not any(isinstance(module, Part) for module in model.modules())


def test_a_norm_is_torch_s_own() -> None:
    """The lean norm against torch's, for rows of all sizes; a row of zeros rests on epsilon alone."""
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
        nn.init.normal_(norm.weight)
        lean = lower_norm(norm)
        assert lean is not None
        rows = torch.randn(5, 48).to(dtype) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 0.0]).to(dtype)[:, None]
        expected = nn.functional.rms_norm(rows, (48,), norm.weight, 1e-5)
        with torch.no_grad():
            assert (lean(rows) - expected).abs().max() <= bound * expected.abs().max()


def test_unknown_choice() -> None:
    with pytest.raises(ConfigError, match="kernels='fast' is unknown; choose one of auto, linear, transposed, packed"):
        TransformersTarget(models.new_model("llama"), kernels="fast")
    with pytest.raises(ConfigError, match="optimize='fast' is unknown; choose auto or off"):
        TransformersTarget(models.new_model("llama"), optimize="fast")
