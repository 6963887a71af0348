"""Layer runners: the same text on each, a model that was changed run as it is, and a choice that says why."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec import Engine, TransformersTarget
from specdec.errors import ConfigError, TargetError
from specdec.models.inspection import why_special
from specdec.native.library import library
from specdec.results import Step
from tests import models, seam
from tests.tiers import once

KNOWN = models.FUSED
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # that the native library has code for
needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler works here")


def native_model(**changes: Any) -> PreTrainedModel:
    return models.new_model("llama", torch.float32, **{**SIZES, **changes})


def storages(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """Name -> address and values of each parameter."""
    return {name: (value.data_ptr(), value.detach().clone()) for name, value in model.named_parameters()}


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "in_parts"), once(KNOWN, [False, True]))
def test_fused_text_is_that_of_generate(family: str, in_parts: bool) -> None:
    model = models.new_model(family)
    prompt = models.prompt_of(11)
    expected = models.reference(model, prompt, 60)
    target = models.target_for(model, execution="fused")
    assert target.options["runner"] == "fused"
    for drafter in ("none", "prompt_lookup", {"name": "lookahead", "window": 5, "ngram": 5, "guesses": 5}):
        with seam.in_parts(in_parts):
            assert Engine(target, drafter=drafter).generate(prompt, 60).token_ids == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("execution", ["modules", "fused", "native"])
def test_a_model_that_is_handed_in_is_left_as_it_is(execution: str) -> None:
    if execution == "native" and library() is None:
        pytest.skip("no C compiler works here")
    model = native_model(attention_bias=True)
    before, modules, prompt = storages(model), list(map(id, model.modules())), models.prompt_of(7)
    expected = models.reference(model, prompt, 30)
    target = models.target_for(model, execution=execution)
    assert target.options["runner"] == execution
    assert Engine(target, drafter="prompt_lookup").generate(prompt, 30).token_ids == expected
    after = storages(model)
    assert before.keys() == after.keys()
    assert all(before[name][0] == after[name][0] for name in before)
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    assert list(map(id, model.modules())) == modules
    assert models.reference(model, prompt, 30) == expected


def test_a_model_that_is_handed_in_is_run_by_its_own_modules_and_says_so() -> None:
    assert "handed in" in TransformersTarget(native_model()).describe()["execution"]["because"]
    with pytest.raises(ConfigError, match=r"execution='fused' runs a copy of a model, .*Engine.from_model\(model"):
        TransformersTarget(native_model(), execution="fused")
    copied = Engine.from_model(native_model(), drafter="prompt_lookup", execution="fused")
    assert "a copy of a live model's" in copied.describe()["model"]["weights"]


def test_biases_take_part() -> None:
    model = models.new_model("llama", attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    prompt = models.prompt_of(7)
    target = models.target_for(model, execution="fused")
    assert Engine(target).generate(prompt, 40).token_ids == models.reference(model, prompt, 40)


# What users, peft, accelerate and quantisers do to layers: each has to be followed, or refused by name.


class Odd(nn.Linear):
    """A linear that is not one, as quantised layers are."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * 1.5


class WithoutWeight(nn.Module):
    """As GPTQ's and AWQ's modules: packed integers, and no ``weight``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("qweight", (linear.weight * 64).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.qweight.to(hidden.dtype) / 64)


class Subclass(torch.Tensor):
    """As torchao's: computes by itself."""


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def patched_forward(layer: Any) -> None:
    mlp = layer.mlp
    mlp.forward = lambda hidden: 1.02 * type(mlp).forward(mlp, hidden)


def patched_layer(layer: Any) -> None:
    own = type(layer).forward
    layer.forward = lambda hidden, **options: 1.08 * own(layer, hidden, **options)


def hooked(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, arguments, output: 1.5 * output)


def hooked_before(layer: Any) -> None:
    layer.mlp.register_forward_pre_hook(lambda module, arguments: (1.5 * arguments[0],))


def odd_class(layer: Any) -> None:
    layer.mlp.up_proj.__class__ = Odd


def without_weight(layer: Any) -> None:
    layer.mlp.up_proj = WithoutWeight(layer.mlp.up_proj)


def parametrized(layer: Any) -> None:
    parametrize.register_parametrization(layer.mlp.up_proj, "weight", Doubled())


def tensor_subclass(layer: Any) -> None:
    weight = 2 * layer.mlp.up_proj.weight.data
    layer.mlp.up_proj.weight = nn.Parameter(weight.as_subclass(Subclass), requires_grad=False)


def other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def wrapped(layer: Any) -> None:
    layer.mlp = nn.Sequential(layer.mlp, nn.Tanh())


CHANGES: dict[Callable[[Any], None], str] = {
    patched_forward: r"model.layers.1.mlp \(LlamaMLP\) has a forward of its own",
    patched_layer: r"model.layers.1 \(LlamaDecoderLayer\) has a forward of its own",
    hooked: r"model.layers.1.mlp \(LlamaMLP\) has hooks",
    hooked_before: r"model.layers.1.mlp \(LlamaMLP\) has hooks",
    odd_class: r"model.layers.1.mlp.up_proj is a Odd",
    without_weight: r"model.layers.1.mlp.up_proj is a WithoutWeight",
    parametrized: r"model.layers.1.mlp.up_proj is a Parametrized\w+",
    tensor_subclass: r"model.layers.1.mlp.up_proj \(Linear\) has a weight that is a Subclass",
    other_activation: "model.layers.1.mlp.act_fn is a GELU, and not as its class makes it",
    wrapped: "model.layers.1.mlp is a Sequential, and not as its class makes it",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_layer_is_followed_and_not_copied(change: Callable[[Any], None]) -> None:
    model, prompt = native_model(), models.prompt_of(7)
    plain = models.reference(model, prompt, 40)
    change(model.model.layers[1])
    expected = models.reference(model, prompt, 40)
    assert expected != plain or change is patched_forward, "a change that changes nothing shows nothing"
    target = TransformersTarget(model)
    assert Engine(target, drafter="prompt_lookup").generate(prompt, 40).token_ids == expected
    with pytest.raises(TargetError, match=CHANGES[change]):
        Engine.from_model(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peft_s_lora_is_followed_and_stays_in_the_model(dtype: torch.dtype) -> None:
    model, prompt = models.new_model("llama", dtype, **SIZES), models.prompt_of(7)
    base = models.reference(model, prompt, 40)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.to(dtype)
    names = sorted(name for name, _ in model.named_parameters())
    expected = models.reference(model, prompt, 40)
    assert expected != base
    assert Engine(TransformersTarget(model)).generate(prompt, 40).token_ids == expected
    assert sorted(name for name, _ in model.named_parameters()) == names
    assert any("lora" in name for name in names)


def test_lora_that_is_trained_after_the_engine_was_built_is_followed() -> None:
    model, prompt = native_model(), models.prompt_of(7)
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"])  # B = 0: nothing yet
    peft.inject_adapter_in_model(config, model)
    engine = Engine(TransformersTarget(model))
    before = models.reference(model, prompt, 40)
    assert engine.generate(prompt, 40).token_ids == before
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    expected = models.reference(model, prompt, 40)
    assert expected != before
    assert engine.generate(prompt, 40).token_ids == expected


def test_dtensors_are_run_by_the_model_s_own_modules(tmp_path: Path) -> None:
    """Tensor parallelism leaves DTensors in the layers; one process is enough to have them."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        layer: Any = native_model().model.layers[1]
        weight = layer.mlp.up_proj.weight.data
        layer.mlp.up_proj.weight = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()]))
        assert why_special(layer.mlp.up_proj) == "has a weight that is a DTensor"
    finally:
        torch.distributed.destroy_process_group()


def test_other_families_are_run_by_their_own_modules_and_the_reason_is_there(tmp_path: Path) -> None:
    model = models.new_model("neox")
    model.save_pretrained(tmp_path)
    target = TransformersTarget.from_pretrained(tmp_path)
    reason = "its model_type 'gpt_neox' is none of cohere, cohere2, "
    assert target.describe()["execution"]["because"].startswith(reason)
    with pytest.raises(ConfigError, match=f"execution='fused' cannot run this model: {reason}"):
        TransformersTarget.from_pretrained(tmp_path, execution="fused")
    with pytest.raises(TargetError, match=f"no copy of this GPTNeoXForCausalLM can be made: {reason}"):
        Engine.from_model(model)


def test_unknown_execution() -> None:
    with pytest.raises(ConfigError, match=r"unknown execution 'fusedd'; did you mean 'fused'\?"):
        TransformersTarget(models.new_model("llama"), execution="fusedd")


# The model changes after the engine was built.


def edit_a_norm(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(3)


def edit_the_last_norm(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.linspace(-1, 1, 64))


def load_another_state(model: Any) -> None:
    model.load_state_dict({name: value.flip(0) for name, value in model.state_dict().items()})


def put_a_parameter(model: Any) -> None:
    model.model.layers[2].self_attn.v_proj.weight = nn.Parameter(torch.zeros(32, 64))


def put_a_module(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(64, 96, bias=False)


def put_a_layer(model: Any) -> None:
    model.model.layers[1] = native_model(seed=2).model.layers[1]


def put_a_head(model: Any) -> None:
    model.lm_head = nn.Linear(64, models.VOCAB, bias=False)


def put_an_embedding(model: Any) -> None:
    model.model.embed_tokens = nn.Embedding(models.VOCAB, 64)


def put_a_norm(model: Any) -> None:
    model.model.norm = LlamaRMSNorm(64)
    edit_the_last_norm(model)


def hook_a_layer(model: Any) -> None:
    hooked(model.model.layers[1])


EDITS = [edit_a_norm, edit_the_last_norm, load_another_state, put_a_parameter, put_a_module, hook_a_layer]
EDITS += [put_a_layer, put_a_head, put_an_embedding, put_a_norm]


@pytest.mark.few(3)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_after_the_engine_was_built_is_followed(edit: Callable[[Any], None]) -> None:
    model, prompt = native_model(), models.prompt_of(7)
    engine = Engine(TransformersTarget(model))
    before = engine.generate(prompt, 40).token_ids
    edit(model)
    expected = models.reference(model, prompt, 40)
    assert expected != before
    assert engine.generate(prompt, 40).token_ids == expected


# The choice.


def test_a_folder_without_a_compiler_is_run_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native_model().save_pretrained(tmp_path)
    if library() is not None:
        told = TransformersTarget.from_pretrained(tmp_path).describe()["execution"]
        assert (told["runner"], told["because"]) == ("native", "all layers run in one call")
    monkeypatch.setattr("specdec.runners.linear.library", lambda: None)
    told = TransformersTarget.from_pretrained(tmp_path).describe()["execution"]
    assert (told["runner"], told["because"]) == ("fused", told["not native"])
    assert told["because"].startswith("native products need a C compiler")


# Beside the model itself; see also test_replicas.py.


def test_the_model_s_own_generate_works_between_and_after_generations() -> None:
    model, prompt = native_model(), models.prompt_of(7)
    expected = models.reference(model, prompt, 20)
    own = model.config._attn_implementation
    target = TransformersTarget(model)
    engine = Engine(target)
    with target.active():
        assert models.reference(model, prompt, 20) == expected
        assert model.config._attn_implementation == own
    assert engine.generate(prompt, 20).token_ids == expected
    assert models.reference(model, prompt, 20) == expected


@pytest.mark.slow
def test_four_threads_share_one_target() -> None:
    model = native_model()
    target, own = TransformersTarget(model), model.config._attn_implementation
    prompts = [models.prompt_of(size, seed=size) for size in range(5, 17)]
    expected = [models.reference(model, prompt, 30) for prompt in prompts]
    found: dict[int, list[int]] = {}

    def work(first: int) -> None:
        for number in range(first, len(prompts), 4):
            found[number] = Engine(target, drafter="prompt_lookup").generate(prompts[number], 30).token_ids

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(prompts))] == expected
    assert model.config._attn_implementation == own


def test_two_targets_of_one_model_decode_at_once() -> None:
    """The first one ends while the second is in mid-text: neither loses its attention function."""
    model, prompt = native_model(), models.prompt_of(7)
    expected, own = models.reference(model, prompt, 20), model.config._attn_implementation
    first, second = Engine(TransformersTarget(model)), Engine(TransformersTarget(model))
    inside, ended = threading.Event(), threading.Event()
    found: list[list[int]] = []

    def wait(step: Step) -> None:
        if step.index == 5:
            inside.set()
            ended.wait()

    other = threading.Thread(target=lambda: found.append(second.generate(prompt, 20, on_step=wait).token_ids))
    with first.target.active():
        other.start()
        inside.wait(60)
    try:
        assert first.generate(prompt, 20).token_ids == expected
    finally:
        ended.set()
        other.join()
    assert found == [expected]
    assert model.config._attn_implementation == own
    assert models.reference(model, prompt, 20) == expected


@pytest.mark.slow
def test_a_target_that_is_gone_does_not_keep_the_model() -> None:
    model = native_model().train()
    with TransformersTarget(model).active():
        pass
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
