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
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specdec import Engine, TransformersTarget
from specdec.costs import measuring as measuring_module
from specdec.costs.curve import CostCurve
from specdec.errors import ConfigError, SpecdecWarning, TargetError
from specdec.native.library import library
from specdec.results import Step
from specdec.runners import choice as choices
from specdec.runners.known_layers import KnownLayer, UnknownModule
from specdec.runners.layers import FusedLayer, FusedNorm
from specdec.runners.linear import PackedLinear
from specdec.runners.native import NativeRunner
from specdec.step.step_output import StepOutput
from tests import models, seam
from tests.tiers import each_once

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # that the native library has code for
needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler works here")


def native_model(**changes: Any) -> PreTrainedModel:
    return models.new_model("llama", torch.float32, **{**SIZES, **changes})


def storages(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """Name -> address and values of each parameter."""
    return {name: (value.data_ptr(), value.detach().clone()) for name, value in model.named_parameters()}


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "in_parts"), each_once(KNOWN, [False, True]))
def test_fused_text_is_that_of_generate(family: str, in_parts: bool) -> None:
    model = models.new_model(family)
    prompt = models.prompt_of(11)
    expected = models.reference(model, prompt, 60)
    target = TransformersTarget(model, execution="fused")
    assert target.runner.name == "fused"
    assert not target.runner.borrows
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
    target = TransformersTarget(model, execution=execution)
    assert target.runner.name == execution
    assert Engine(target, drafter="prompt_lookup").generate(prompt, 30).token_ids == expected
    after = storages(model)
    assert before.keys() == after.keys()
    assert all(before[name][0] == after[name][0] for name in before)
    assert all(torch.equal(before[name][1], after[name][1]) for name in before)
    assert list(map(id, model.modules())) == modules
    assert models.reference(model, prompt, 30) == expected


def test_auto_runs_a_model_that_is_handed_in_by_its_own_modules_and_says_so() -> None:
    target = TransformersTarget(native_model())
    assert target.runner.name == "modules"
    assert "handed in" in target.plan.reason
    assert target.describe()["execution"]["because"] == target.plan.reason


def test_biases_take_part() -> None:
    model = models.new_model("llama", attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    prompt = models.prompt_of(7)
    target = TransformersTarget(model, execution="fused")
    assert Engine(target).generate(prompt, 40).token_ids == models.reference(model, prompt, 40)


def test_an_owned_model_s_weights_are_held_once(tmp_path: Path) -> None:
    model = models.new_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    TransformersTarget(model, execution="fused", owned=True)
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
    patched_forward: r"layer 1: mlp \(LlamaMLP\) has a forward of its own",
    patched_layer: r"layer 1: itself \(LlamaDecoderLayer\) has a forward of its own",
    hooked: r"layer 1: mlp \(LlamaMLP\) has hooks",
    hooked_before: r"layer 1: mlp \(LlamaMLP\) has hooks",
    odd_class: r"layer 1: mlp\.up_proj is a Odd",
    without_weight: r"layer 1: mlp\.up_proj is a WithoutWeight",
    parametrized: r"layer 1: mlp\.up_proj \(Parametrized\w+\) is parametrized",
    tensor_subclass: r"layer 1: mlp\.up_proj \(Linear\) has a weight that is a Subclass",
    other_activation: r"layer 1: mlp\.act_fn is a GELU",
    wrapped: r"layer 1: mlp is a Sequential",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_layer_is_run_by_its_own_module(change: Callable[[Any], None]) -> None:
    model, prompt = native_model(), models.prompt_of(7)
    plain = models.reference(model, prompt, 40)
    change(model.model.layers[1])
    expected = models.reference(model, prompt, 40)
    assert expected != plain or change is patched_forward, "a change that changes nothing shows nothing"
    target = TransformersTarget(model, owned=True)
    assert target.runner.name == "fused"  # the other two layers
    assert Engine(target, drafter="prompt_lookup").generate(prompt, 40).token_ids == expected
    with pytest.raises(ConfigError, match=f"execution='native' cannot run this model: .*{CHANGES[change]}"):
        TransformersTarget(model, execution="native")


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
    for owned in (False, True):
        target = TransformersTarget(model, owned=owned)
        assert Engine(target).generate(prompt, 40).token_ids == expected
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
        with pytest.raises(UnknownModule, match=r"layer 1: mlp\.up_proj \(Linear\) has a weight that is a DTensor"):
            KnownLayer.of(layer, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_other_families_are_run_by_their_own_modules_and_the_reason_is_there() -> None:
    target = TransformersTarget(models.new_model("gemma2"), owned=True)
    assert target.runner.name == "modules"
    assert target.plan.reason == "fused layers are Llama-like ones, and layer 0 is a Gemma2DecoderLayer"
    with pytest.raises(ConfigError, match="execution='fused' cannot run this model: fused layers are Llama-like ones"):
        TransformersTarget(models.new_model("gemma2"), execution="fused")


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


@pytest.mark.few(1)
@pytest.mark.parametrize(("execution", "edit"), each_once(["modules", "fused", "native"], EDITS))
def test_an_edit_after_the_engine_was_built_is_followed_or_refused(execution: str, edit: Callable[[Any], None]) -> None:
    if execution == "native" and library() is None:
        pytest.skip("no C compiler works here")
    model, prompt = native_model(), models.prompt_of(7)
    engine = Engine(TransformersTarget(model, execution=execution))
    before = engine.generate(prompt, 40).token_ids
    edit(model)
    expected = models.reference(model, prompt, 40)
    assert expected != before
    if execution == "modules":
        assert engine.generate(prompt, 40).token_ids == expected
        return
    with pytest.raises(TargetError, match=f"was changed after its {execution} runner was made, which would not fol"):
        engine.generate(prompt, 40)
    assert Engine(TransformersTarget(model)).generate(prompt, 40).token_ids == expected


@needs_compiler
def test_an_edit_of_a_model_that_specdec_owns_is_refused() -> None:
    model = native_model()
    engine = Engine(TransformersTarget(model, owned=True))
    assert engine.target.runner.name == "native"  # type: ignore[attr-defined]
    edit_a_norm(model)
    with pytest.raises(TargetError, match="was changed after its native runner was made"):
        engine.generate(models.prompt_of(7), 4)


# Runners that compute something else.


class Wrong(FusedLayer):
    """What it adds to the residual stream is a tenth too much."""

    def __call__(self, residual: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return residual + 1.1 * (super().__call__(residual, *arguments) - residual)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_runner_that_differs_is_not_taken(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "FusedLayer", Wrong)
    model, prompt = models.new_model("llama", dtype), models.prompt_of(7)
    expected = models.reference(model, prompt, 30)
    with pytest.raises(TargetError, match=r"execution='fused' does not compute what this model does: by .* rounding"):
        TransformersTarget(model, execution="fused")
    monkeypatch.setattr(choices, "why_not", lambda *_: "there is no compiler")
    with pytest.warns(SpecdecWarning, match="fused layers are not used: its logits differ from the model's own: by"):
        target = TransformersTarget(model, owned=True)
    assert target.runner.name == "modules"
    assert Engine(target).generate(prompt, 30).token_ids == expected


def test_a_runner_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises: the errors of compilers and drivers are of no one class."""

    class Broken(FusedLayer):
        def __call__(self, *_: Any) -> torch.Tensor:
            raise SyntaxError("no such instruction\nhere")

    monkeypatch.setattr(choices, "FusedLayer", Broken)
    with pytest.warns(SpecdecWarning, match="fused layers are not used: .* it fails: SyntaxError: no such instruction"):
        target = TransformersTarget(models.new_model("llama", torch.float64), owned=True)
    assert target.runner.name == "modules"


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_layers_that_differ_are_not_taken(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = NativeRunner.finish

    def odd(*arguments: Any) -> Any:
        output = finish(*arguments)
        return StepOutput(1.5 * output.given + output.given.roll(1), output.rows, out=output.out, hidden=output.hidden)

    monkeypatch.setattr(NativeRunner, "finish", odd)
    model = models.new_model("llama", dtype, tie_word_embeddings=True, **SIZES)
    before, prompt = {name: value.clone() for name, value in model.state_dict().items()}, models.prompt_of(7)
    expected = models.reference(model, prompt, 30)
    with pytest.warns(SpecdecWarning, match="native layers are not used: its logits differ from the model's own: by"):
        target = TransformersTarget(model, owned=True)
    assert target.runner.name == "fused"
    assert "differ" in target.plan.others["native"]
    if dtype is torch.float32:  # bfloat16 may round a near tie the other way
        assert Engine(target).generate(prompt, 30).token_ids == expected
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# The choice.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and models large enough to be timed."""
    monkeypatch.setattr(measuring_module, "cache_folder", lambda: tmp_path / "specdec")
    monkeypatch.setattr(choices, "_SMALL", 0)
    return tmp_path / "specdec" / "cost"


def timed(monkeypatch: pytest.MonkeyPatch, **seconds: list[float]) -> list[str]:
    """Steps of 1 and 8 rows take these times; returns the names of the runners that are timed."""
    asked: list[str] = []

    def measure(target: TransformersTarget, **_: Any) -> CostCurve:
        asked.append(target.runner.name)
        times = [seconds[target.runner.name]]
        return CostCurve(machine=measuring_module.describe(target), rows=[1, 8], lengths=[256], seconds=times)

    monkeypatch.setattr(measuring_module, "measure", measure)
    return asked


@needs_compiler
@pytest.mark.parametrize(
    ("native", "taken"),
    [([1.0, 2.0], "native"), ([1.2, 2.4], "native"), ([1.4, 2.4], "fused"), ([0.5, 9.0], "fused")],
)
def test_whole_steps_decide(native: list[float], taken: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch, fused=[1.0, 2.0], native=native)
    prompt, expected = models.prompt_of(7), models.reference(native_model(), models.prompt_of(7), 30)
    for _ in range(2):  # measured, then known
        target = TransformersTarget(native_model(), owned=True)
        assert target.runner.name == taken
        assert Engine(target).generate(prompt, 30).token_ids == expected
        told = target.plan.reason if taken == "native" else target.plan.others["native"]
        assert told.startswith("whole steps of 1 and 8 rows took")
    assert asked == ["fused", "native"]


@needs_compiler
def test_a_busy_machine_decides_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch, fused=[1.0, 2.0], native=[20.0, 30.0])
    with monkeypatch.context() as patch:
        patch.setattr(measuring_module, "thread_time", lambda: 0.0)  # others had the processor all the time
        assert TransformersTarget(native_model(), owned=True).runner.name == "native"
    assert not folder.exists()
    assert TransformersTarget(native_model(), owned=True).runner.name == "fused"
    assert asked == ["fused", "fused", "native"]


@needs_compiler
def test_dtype_threads_and_shapes_are_timed_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, threads = timed(monkeypatch, fused=[1.0, 1.0], native=[1.0, 1.0]), torch.get_num_threads()
    TransformersTarget(native_model(), owned=True)
    TransformersTarget(native_model(num_hidden_layers=2), owned=True)
    TransformersTarget(models.new_model("llama", torch.bfloat16, **SIZES), owned=True)
    try:
        torch.set_num_threads(threads + 1)
        TransformersTarget(native_model(), owned=True)
    finally:
        torch.set_num_threads(threads)
    assert len(asked) == 2 * 4
    assert len(list(folder.iterdir())) == 2 * 4


@needs_compiler
def test_another_library_is_timed_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch, fused=[1.0, 1.0], native=[2.0, 2.0])
    assert TransformersTarget(native_model(), owned=True).runner.name == "fused"
    (kept,) = (machine for path in folder.iterdir() if (machine := CostCurve.load(path).machine)["runner"] == "native")
    digest, _, tiles = kept["library"].partition("-")
    assert digest in library()._name
    assert (tiles == "tiles") == bool(library().specdec_tiles())
    monkeypatch.setattr(measuring_module, "digest_of_library", lambda: "of another compiler")
    again = timed(monkeypatch, fused=[1.0, 1.0], native=[1.0, 1.0])
    assert TransformersTarget(native_model(), owned=True).runner.name == "native"
    assert (asked, again) == (["fused", "native"], ["native"])


@needs_compiler
def test_a_broken_file_of_times_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch, fused=[1.0, 1.0], native=[2.0, 2.0])
    TransformersTarget(native_model(), owned=True)
    kept = {path: path.read_text() for path in folder.iterdir()}
    for path in kept:
        path.write_text("{")
    with pytest.warns(SpecdecWarning, match=r"is no cost curve .*; measuring anew"):
        target = TransformersTarget(native_model(), owned=True)
    assert target.runner.name == "fused"
    assert asked == ["fused", "native"] * 2
    assert {path: path.read_text() for path in folder.iterdir()} == kept


@needs_compiler
def test_small_and_large_models_are_not_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = timed(monkeypatch)
    for name, value in (("_SMALL", 1 << 30), ("_LARGE", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(choices, name, value)
            assert TransformersTarget(native_model(), owned=True).runner.name == "native"
    assert not asked
    assert not folder.exists()


@needs_compiler
@pytest.mark.slow
def test_steps_are_really_timed(folder: Path) -> None:
    assert TransformersTarget(native_model(), owned=True).runner.name in ("native", "fused")
    curves = [CostCurve.load(path) for path in folder.iterdir()]
    assert sorted(curve.machine["runner"] for curve in curves) == ["fused", "native"]


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
    assert TransformersTarget(model).runner.name == "modules"


@pytest.mark.slow
def test_a_target_that_is_gone_does_not_keep_the_model() -> None:
    model = native_model().train()
    with TransformersTarget(model).active():
        pass
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_norm_is_torch_s_own() -> None:
    """The lean norm against torch's, for rows of all sizes; a row of zeros rests on epsilon alone."""
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
        nn.init.normal_(norm.weight)
        lean = FusedNorm(norm)
        rows = torch.randn(5, 48).to(dtype) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 0.0]).to(dtype)[:, None]
        expected = nn.functional.rms_norm(rows, (48,), norm.weight, 1e-5)
        with torch.no_grad():
            assert (lean(rows) - expected).abs().max() <= bound * expected.abs().max()
