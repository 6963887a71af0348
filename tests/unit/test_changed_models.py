"""Models that change after their engine was built: the text is the changed model's, or what changed is named."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama as llama

from specdec import Engine, PrefixCache, TransformersTarget
from specdec.errors import TargetError
from specdec.native.library import library
from tests import models
from tests.tiers import each_once

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # that the native library has code for
PROMPT = models.prompt_of(21)

Edit = Callable[[Any, pytest.MonkeyPatch], object]


def model_of(family: str = "llama") -> PreTrainedModel:
    return models.new_model(family, torch.float32, **SIZES)


def random_weight(seed: int, *shape: int) -> torch.Tensor:
    return 0.3 * torch.randn(*(shape or (64, 96)), generator=torch.Generator().manual_seed(seed))


def mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


def merge_lora(model: Any) -> None:
    """Peft adds to ``weight.data``, and puts the very modules back: no counter moves, and no identity changes."""
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).merge_and_unload()


def other_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    def negated(*given: Any, **named: Any) -> Any:
        output = forward(*given, **named)
        output.logits = -output.logits
        return output

    return negated


def set_weights(model: Any, times: int) -> None:
    for seed in range(times):
        mlp(model).down_proj.weight = nn.Parameter(random_weight(seed))
        gc.collect()


def set_data(model: Any, times: int) -> None:
    for seed in range(times):
        mlp(model).down_proj.weight.data = random_weight(seed)


# What is done, what is then said of it where it is not followed, and whether the model's own modules follow it.
EDITS: dict[str, tuple[Edit, str, bool]] = {
    "a weight": (lambda m, _: set_weights(m, 1), r"the weight of model.layers.1.mlp.down_proj \(Linear\) is an", True),
    "a weight twice": (lambda m, _: set_weights(m, 2), "the weight of model.layers.1.mlp.down_proj", True),
    "data": (lambda m, _: set_data(m, 1), "the weight of .* lies elsewhere in memory", True),
    "data twice": (lambda m, _: set_data(m, 2), "the weight of model.layers.1.mlp.down_proj", True),
    "past the counter": (lambda m, _: mlp(m).down_proj.weight.data.neg_(), "the weight of .* was written to", True),
    "by numpy": (
        lambda m, _: mlp(m).up_proj.weight.detach().numpy().__imul__(-1),
        "the weight of model.layers.1.mlp.up_proj .* was written to",
        True,
    ),
    "transposed": (
        lambda m, _: setattr(w := m.model.layers[0].self_attn.o_proj.weight, "data", w.data.t()),
        "the weight of .*o_proj",
        True,
    ),
    "merged adapters": (lambda m, _: merge_lora(m), "the weight of model.layers.0.self_attn.q_proj", True),
    "another dtype": (lambda m, _: m.to(torch.bfloat16), "dtype of its embedding is torch.bfloat16, and was", False),
    "there and back": (lambda m, _: m.to(torch.bfloat16).float(), "the (weight|inv_freq) of", False),
    "a layer's dtype": (lambda m, _: mlp(m).half(), "is torch.float16, and was torch.float32", True),
    "epsilon": (lambda m, _: setattr(m.model.layers[0].input_layernorm, "variance_epsilon", 90.0), "is 90.0", True),
    "last epsilon": (lambda m, _: setattr(m.model.norm, "variance_epsilon", 90.0), "variance_epsilon of model.n", True),
    "scaling": (lambda m, _: setattr(m.model.layers[0].self_attn, "scaling", 3.0), "scaling of .* is 3.0", True),
    "a class": (
        lambda m, patch: patch.setattr(llama.LlamaMLP, "forward", lambda own, x: -own.up_proj(x)[..., :64]),
        "the forward of the class LlamaMLP is another one",
        True,
    ),
    "a function": (
        lambda m, patch: patch.setattr(llama, "apply_rotary_pos_emb", lambda query, key, *_, **__: (query, key)),
        "the apply_rotary_pos_emb of its modeling file is another one",
        True,
    ),
    "a module's class": (
        lambda m, _: setattr(mlp(m), "__class__", type("Odd", (llama.LlamaMLP,), {"forward": lambda own, x: -x})),
        "was a LlamaMLP",
        True,
    ),
    "a hook on all modules": (
        lambda m, _: register_module_forward_hook(lambda own, _, x: -x if type(own) is llama.LlamaMLP else None),
        "torch has other hooks",
        True,
    ),
    "a hook on the head": (lambda m, _: m.lm_head.register_forward_hook(lambda *given: -given[2]), "other hooks", True),
    "adapters": (
        lambda m, _: peft.inject_adapter_in_model(
            peft.LoraConfig(r=4, lora_alpha=64, target_modules=["up_proj"], init_lora_weights=False), m
        ),
        "the up_proj of model.layers.0.mlp .* is another one",
        True,
    ),
    "frequencies": (lambda m, _: m.model.rotary_emb.inv_freq.mul_(0.3), "inv_freq of model.rotary_emb .* edit", False),
    "frequencies' data": (lambda m, _: m.model.rotary_emb.inv_freq.data.mul_(0.3), "inv_freq .* written to", False),
    "other frequencies": (
        lambda m, _: setattr(m.model.rotary_emb, "inv_freq", 0.3 * m.model.rotary_emb.inv_freq),
        "the inv_freq of model.rotary_emb .* is another one",
        False,
    ),
    "rotary scaling": (
        lambda m, _: setattr(m.model.rotary_emb, "attention_scaling", 2.0),
        "the attention_scaling of model.rotary_emb .* is 2.0, and was 1.0",
        False,
    ),
    "rotary forward": (
        lambda m, _: setattr(m.model.rotary_emb, "forward", lambda x, _: (x[..., :16] * 0, x[..., :16] * 0)),
        "model.rotary_emb .* has a forward of its own",
        False,
    ),
    "a rotary module": (
        lambda m, _: setattr(m.model, "rotary_emb", _slower(m.model.rotary_emb)),
        "the rotary_emb of model .* is another one",
        False,
    ),
    "a hook on the model": (
        lambda m, _: m.register_forward_hook(lambda own, given, output: other_logits(lambda: output)()),
        "the hooks of its LlamaForCausalLM",
        False,
    ),
    "the model's forward": (
        lambda m, _: setattr(m, "forward", other_logits(m.forward)),
        "the forward of its LlamaForCausalLM",
        False,
    ),
    "fewer layers": (
        lambda m, _: setattr(m.config, "num_hidden_layers", 1),
        "the num_hidden_layers of its LlamaConfig is 1, and was 3",
        False,
    ),
}


def _slower(rotary: Any) -> Any:
    other = copy.deepcopy(rotary)
    other.inv_freq.mul_(0.3)
    return other


@contextmanager
def edits() -> Iterator[pytest.MonkeyPatch]:
    """Of classes, functions and all modules, until the end of a test."""
    hooks = torch.nn.modules.module._global_forward_hooks
    with pytest.MonkeyPatch.context() as patch:
        try:
            yield patch
        finally:
            hooks.clear()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of transformers, asked by peft
@pytest.mark.parametrize(("execution", "edit"), each_once(["transformers", "fused", "native"], EDITS))
def test_the_text_is_the_changed_models_or_what_changed_is_named(execution: str, edit: str) -> None:
    """With a prefix cache of before as without one."""
    if execution == "native" and library() is None:
        pytest.skip("no C compiler works here")
    change, told, follows = EDITS[edit]
    model, kept = model_of(), PrefixCache()
    engine = Engine(TransformersTarget(model, execution=execution))
    before = engine.generate(PROMPT, 30, prefix_cache=kept).token_ids
    with edits() as patch:
        torch.manual_seed(3)
        change(model, patch)
        if execution == "transformers" and follows and edit != "a layer's dtype":  # which torch refuses
            expected = models.reference(model, PROMPT, 30)
            assert expected != before or "epsilon" in edit
            assert engine.generate(PROMPT, 30, prefix_cache=kept).token_ids == expected
            assert engine.generate(PROMPT, 30).token_ids == expected
        elif not (execution == "transformers" and follows):
            for cache in (kept, None):
                with pytest.raises(TargetError, match=f"was changed after .*: .*{told}"):
                    engine.generate(PROMPT, 30, prefix_cache=cache)
