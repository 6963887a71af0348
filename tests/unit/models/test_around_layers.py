"""What is done to a model around its layers, or to its ``generate``: followed, or refused by its name, never lost.

By custom_generate, whose target is made before or in the call, and by an engine, made before or after the change.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import GenerationMixin, LlamaForCausalLM

import specdec
from specdec import Engine, TransformersTarget
from specdec.errors import ConfigError, SpecdecError, SpecdecWarning, TargetError
from tests.models import new_model, prompt_of, reference

PROMPT, NEW = prompt_of(9), 10
TUNED: dict[str, Any] = {"task_type": "CAUSAL_LM"}
LINEARS = {**TUNED, "target_modules": ["q_proj", "up_proj"]}

VIRTUAL: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **TUNED),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **TUNED),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, **TUNED),
    "CPT": lambda: peft.CPTConfig(cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3], **TUNED),
    "multitask prompt tuning": lambda: peft.MultitaskPromptTuningConfig(num_virtual_tokens=4, num_tasks=2, **TUNED),
}
OF_THE_TEXT: dict[str, Callable[[], Any]] = {
    "activated LoRA": lambda: peft.LoraConfig(
        r=4, init_lora_weights=False, alora_invocation_tokens=[*PROMPT[5:7]], **LINEARS
    ),
    "Poly": lambda: peft.PolyConfig(r=4, n_tasks=2, init_weights=False, **LINEARS),
}
WEIGHTS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, **LINEARS),
    "LoRA on the head": lambda: peft.LoraConfig(
        r=4, lora_alpha=64, init_lora_weights=False, target_modules=["lm_head"], **TUNED
    ),
    "modules to save": lambda: peft.LoraConfig(
        r=4, init_lora_weights=False, modules_to_save=["lm_head", "embed_tokens"], **LINEARS
    ),
    "IA3": lambda: peft.IA3Config(init_ia3_weights=False, feedforward_modules=["up_proj"], **LINEARS),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **TUNED),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], **TUNED),
}


def tuned(config: Any) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of configs and of transformers
        model: Any = peft.get_peft_model(new_model("llama"), config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, dtype=weight.dtype), alpha=0.5)
    return model


def text(model: Any, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **options}
    found: list[int] = model.generate(input_ids=ids, **options)[0, len(PROMPT) :].tolist()
    return found


def loop(**options: Any) -> Any:
    return functools.partial(specdec.custom_generate, **{"policy": "off", **options})


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_of_weights_are_followed(kind: str) -> None:
    model = tuned(WEIGHTS[kind]())
    expected = text(model)
    assert expected != reference(new_model("llama"), PROMPT, NEW)
    assert text(model, custom_generate=loop()) == expected
    assert text(model, custom_generate=loop(target=TransformersTarget(model.get_base_model()))) == expected
    assert Engine(TransformersTarget(model), None, "prompt_lookup").generate(PROMPT, NEW).token_ids == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", {**VIRTUAL, **OF_THE_TEXT})
@pytest.mark.parametrize("known", [False, True], ids=["", "target is known"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_that_do_more_are_refused(kind: str, known: bool) -> None:
    """The untuned text came out; it is the base model's own, which is left as it was."""
    model = tuned({**VIRTUAL, **OF_THE_TEXT}[kind]())
    base, options = (
        model.get_base_model(),
        {"task_ids": torch.tensor([1])} if kind in ("multitask prompt tuning",) else {},
    )
    if known and kind in VIRTUAL:
        options["custom_generate"] = loop(target=TransformersTarget(base))
    with pytest.raises(SpecdecError, match=r"virtual tokens|invocation tokens|task_ids") as caught:
        text(model, **{"custom_generate": loop(), **options})
    assert isinstance(caught.value, TargetError) or "task_ids was given" in str(caught.value)
    with pytest.raises(TargetError, match=r"the adapter 'default' of this PeftModelForCausalLM is .*such as LoRA"):
        TransformersTarget(model)
    if kind in VIRTUAL:
        assert text(base, custom_generate=loop()) == reference(new_model("llama"), PROMPT, NEW)


# What users do to a model.


def shift(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:  # `generate` reads that name
    made = LlamaForCausalLM.prepare_inputs_for_generation(model, input_ids, **kwargs)
    return {**made, "input_ids": (made["input_ids"] + 1) % 32}


def fewer(output: Any) -> Any:
    output.logits[..., ::2] -= 9
    return output


class Prepares(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return shift(self, input_ids, **kwargs)


class Updates(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, *given: Any, **options: Any) -> Any:
        return super()._update_model_kwargs_for_generation(*given, **options)


class Samples(LlamaForCausalLM):
    def _sample(self, *given: Any, **options: Any) -> Any:
        return super()._sample(*given, **options)


class Calls(LlamaForCausalLM):
    def __call__(self, *given: Any, **options: Any) -> Any:
        return fewer(super().__call__(*given, **options))


def set_method(model: Any) -> None:
    model.prepare_inputs_for_generation = MethodType(shift, model)


def set_function(model: Any) -> None:
    known = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda input_ids, **kwargs: known(input_ids, **kwargs)


def set_class(kind: type) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.__class__ = kind

    return change


def set_forward(model: Any) -> None:
    forward = model.forward
    model.forward = lambda *given, **options: fewer(forward(*given, **options))


def set_decoder_forward(model: Any) -> None:
    forward = model.model.forward
    model.model.forward = lambda *given, **options: forward(*given, **options)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a method": (set_method, "prepare_inputs_for_generation of this LlamaForCausalLM is replaced by a method of"),
    "a function": (set_function, "prepare_inputs_for_generation of this LlamaForCausalLM is replaced, which"),
    "a class that prepares": (set_class(Prepares), "prepare_inputs_for_generation of this Prepares is Prepares's own"),
    "a class that updates": (
        set_class(Updates),
        "_update_model_kwargs_for_generation of this Updates is Updates's own",
    ),
    "a class that samples": (set_class(Samples), "_sample of this Samples is Samples's own"),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "a class that is called": set_class(Calls),
    "a forward": set_forward,
    "a decoder's forward": set_decoder_forward,
    "a decoder's hook": lambda model: model.model.register_forward_hook(lambda *given: None),
    "a hook": lambda model: model.register_forward_hook(lambda module, given, output: fewer(output)),
    "a hook that only looks": lambda model: model.register_forward_hook(lambda module, given, output: None),
    "a hook before": lambda model: model.register_forward_pre_hook(lambda *given: given[1:], with_kwargs=True),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*attention_mask")
def test_what_is_done_around_the_model_is_refused(change: str) -> None:
    """Targets that were made before see it, too, whichever check says so first."""
    model: Any = new_model("llama")
    before = TransformersTarget(model)
    apply, message = CHANGES[change]
    apply(model)
    with pytest.raises(TargetError, match=message):
        TransformersTarget(model)
    with pytest.raises(TargetError):
        text(model, custom_generate=loop(target=before))
    with pytest.raises(TargetError):
        Engine(before).generate(PROMPT, 4)
    with pytest.warns(SpecdecWarning, match="1 of 1 prompts failed"):
        assert isinstance(Engine(before).generate_batch([PROMPT])[0].error, TargetError)


@pytest.mark.few(4)
@pytest.mark.parametrize("change", AROUND)
def test_what_is_done_around_the_layers_is_followed(change: str) -> None:
    """Whether the target was made before or afterwards."""
    model: Any = new_model("llama")
    before = TransformersTarget(model)
    AROUND[change](model)
    expected = reference(model, PROMPT, 8)
    for target in (before, TransformersTarget(model)):
        assert Engine(target, drafter="lookahead").generate(PROMPT, 8).token_ids == expected
    assert text(model, custom_generate=loop(target=before), max_new_tokens=8) == expected


def test_a_patch_of_the_class_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As research code does; a wrapper of it that says to be it is none, either."""
    model: Any = new_model("llama")
    target, known = TransformersTarget(model), GenerationMixin._sample

    @functools.wraps(known)
    def sample(*given: Any, **options: Any) -> Any:
        return known(*given, **options)

    monkeypatch.setattr(GenerationMixin, "_sample", sample)
    with pytest.raises(TargetError, match="_sample of this LlamaForCausalLM is GenerationMixin's own"):
        Engine(target).generate(PROMPT, 4)


def test_a_method_that_is_set_back_is_no_change() -> None:
    """As peft leaves it behind."""
    model: Any = new_model("llama")
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation
    model.forward = model.forward
    assert Engine(TransformersTarget(model)).generate(PROMPT, 4).token_ids == reference(model, PROMPT, 4)


@pytest.mark.slow  # torch's compiler is imported
def test_a_compiled_forward_is_the_model_s_own() -> None:
    model: Any = new_model("llama")
    expected = reference(model, PROMPT, 4)
    model.forward = torch.compile(model.forward, backend="eager")
    assert Engine(TransformersTarget(model)).generate(PROMPT, 4).token_ids == expected


class Wrapper(nn.Module):
    """A model that answers another prompt, and is asked for all else that the inner one has."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.inner(*given, **options)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return self.inner.generate((input_ids + 1) % 32, **options)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("inner", "_modules") else getattr(self.inner, name)


class Generates(LlamaForCausalLM):
    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        return super().generate((input_ids + 1) % 32, **options)


def set_generate(model: Any) -> None:
    generate = model.generate
    model.generate = lambda input_ids, **options: generate((input_ids + 1) % 32, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Wrapper, "generate of this Wrapper is Wrapper's own"),
        (set_class(Generates), "generate of this Generates is Generates's own"),
        (set_generate, "generate of this LlamaForCausalLM is replaced, which"),
    ],
)
def test_a_generate_of_its_own(change: Callable[[Any], Any], message: str) -> None:
    """What it does around transformers' ``generate`` is done with a custom loop, too; an engine calls none of it."""
    model: Any = new_model("llama")
    model = change(model) or model
    expected = text(model)
    assert expected != reference(new_model("llama"), PROMPT, NEW)
    assert text(model, custom_generate=loop()) == expected
    with pytest.raises(TargetError, match=message):
        Engine(TransformersTarget(model)).generate(PROMPT, NEW)


def test_an_unknown_input_is_named() -> None:
    with pytest.raises(ConfigError, match="labels was given"):
        text(new_model("llama"), labels=torch.tensor([PROMPT]), custom_generate=loop())
