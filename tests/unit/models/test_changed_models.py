"""Models that change after their engine was built: the text is the changed model's, or what changed is named."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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
from specdec.step.cache import KVCache, LayerSpec
from tests import models, seam

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # that the native library has code for
PROMPT = models.prompt_of(21)
KINDS = ("sliding_attention", "full_attention", "sliding_attention")

needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler works here")

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers
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


def set_data_where_it_was(model: Any) -> None:
    """Other numbers at the weight's first address, which the allocator gives again once it was left."""
    weight = mlp(model).down_proj.weight
    first = weight.data_ptr()
    for seed in range(100):
        weight.data = random_weight(seed)
        if seed and weight.data_ptr() == first:
            break


# What is done, what is then said of it where it is not followed, and whether the model's own forward follows it.
EDITS: dict[str, tuple[Edit, str, bool]] = {
    "a weight": (lambda m, _: set_weights(m, 1), r"the weight of model.layers.1.mlp.down_proj \(Linear\) is an", True),
    "a weight twice": (lambda m, _: set_weights(m, 2), "the weight of model.layers.1.mlp.down_proj", True),
    "data": (lambda m, _: set_data(m, 1), "the weight of .* lies elsewhere in memory", True),
    "data twice": (lambda m, _: set_data(m, 2), "the weight of model.layers.1.mlp.down_proj", True),
    "data at one address": (lambda m, _: set_data_where_it_was(m), "the weight of model.layers.1.mlp", True),
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
    "there and back": (lambda m, _: m.to(torch.bfloat16).float(), "the (weight|inv_freq) of", True),
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
    "a hook on the head": (
        lambda m, _: m.lm_head.register_forward_hook(lambda *given: -given[2]),
        r"lm_head \(Linear\) has other hooks",
        True,
    ),
    "a bias": (
        lambda m, _: setattr(m.lm_head, "bias", nn.Parameter(torch.linspace(-90, 90, models.VOCAB))),
        "the bias of lm_head",
        True,
    ),
    "adapters": (
        lambda m, _: peft.inject_adapter_in_model(
            peft.LoraConfig(r=4, lora_alpha=64, target_modules=["up_proj"], init_lora_weights=False), m
        ),
        "the up_proj of model.layers.0.mlp .* is another one",
        True,
    ),
    "frequencies": (lambda m, _: m.model.rotary_emb.inv_freq.mul_(0.3), "inv_freq of model.rotary_emb .* edit", True),
    "frequencies' data": (lambda m, _: m.model.rotary_emb.inv_freq.data.mul_(0.3), "inv_freq .* written to", True),
    "other frequencies": (
        lambda m, _: setattr(m.model.rotary_emb, "inv_freq", 0.3 * m.model.rotary_emb.inv_freq),
        "the inv_freq of model.rotary_emb .* is another one",
        True,
    ),
    "rotary scaling": (
        lambda m, _: setattr(m.model.rotary_emb, "attention_scaling", 2.0),
        "the attention_scaling of model.rotary_emb .* is 2.0, and was 1.0",
        True,
    ),
    "rotary forward": (
        lambda m, _: setattr(m.model.rotary_emb, "forward", lambda x, position_ids: (x[..., :16] * 0, x[..., :16] * 0)),
        "model.rotary_emb .* has a forward of its own",
        True,
    ),
    "a rotary module": (
        lambda m, _: setattr(m.model, "rotary_emb", _slower(m.model.rotary_emb)),
        "the rotary_emb of model .* is another one",
        True,
    ),
    "a hook on the model": (
        lambda m, _: m.register_forward_hook(lambda own, given, output: other_logits(lambda: output)()),
        "the hooks of its LlamaForCausalLM",
        True,
    ),
    "the model's forward": (
        lambda m, _: setattr(m, "forward", other_logits(m.forward)),
        "the forward of its LlamaForCausalLM",
        True,
    ),
    "fewer layers": (
        lambda m, _: setattr(m.config, "num_hidden_layers", 1),
        "the num_hidden_layers of its LlamaConfig is 1, and was 3",
        False,
    ),
}


# What a kept beginning is not held against, so that a user has to clear it.
UNSEEN = {"past the counter", "by numpy", "merged adapters", "epsilon", "last epsilon", "scaling", "a class"}
UNSEEN |= {"a function", "a module's class", "a hook on all modules", "a hook on the head", "frequencies' data"}
UNSEEN |= {"rotary scaling", "rotary forward", "a hook on the model", "the model's forward"}


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


@pytest.mark.few(3)
@pytest.mark.parametrize("edit", EDITS)
def test_the_text_is_the_changed_models_or_what_changed_is_named(edit: str) -> None:
    """With a prefix cache of before as without one, where weights are others, and else once it is cleared."""
    change, told, follows = EDITS[edit]
    model, kept = model_of(), PrefixCache()
    engine = Engine(TransformersTarget(model))
    before, version = engine.generate(PROMPT, 30, prefix_cache=kept).token_ids, engine.target.version()
    with edits() as patch:
        torch.manual_seed(3)
        change(model, patch)
        if follows:
            assert (engine.target.version() == version) == (edit in UNSEEN)
        if engine.target.version() == version:
            kept.clear()
        for cache in (kept, None):
            if follows:
                assert engine.generate(PROMPT, 30, prefix_cache=cache).token_ids == models.reference(model, PROMPT, 30)
            else:
                with pytest.raises(TargetError, match=f"was changed after .*: .*{told}"):
                    engine.generate(PROMPT, 30, prefix_cache=cache)
        assert not follows or models.reference(model, PROMPT, 30) != before or "epsilon" in edit


def _cap(model: Any) -> None:
    model.config.final_logit_softcapping = 0.01


def _window(model: Any) -> None:
    model.config.sliding_window = 4


def _kinds(model: Any) -> None:
    model.config.layer_types[0] = "full_attention"


@pytest.mark.parametrize("edit", [_cap, _window, _kinds])
def test_what_a_config_says_while_a_model_runs(edit: Callable[[Any], None]) -> None:
    model = models.new_model("gemma2", torch.float32, layer_types=[*KINDS], **SIZES)
    engine = Engine(TransformersTarget(model))
    engine.generate(PROMPT, 4)
    edit(model)
    with pytest.raises(TargetError, match=r"the (final_logit|sliding_w|layer_t)\w+ of its Gemma2Config is"):
        engine.generate(PROMPT, 4)


def test_what_changes_no_text_is_let_pass(tmp_path: Path) -> None:
    model, kept = model_of(), PrefixCache()
    engine = Engine(TransformersTarget(model))
    expected = engine.generate(PROMPT, 9, prefix_cache=kept).token_ids
    changes: Sequence[Callable[[], object]] = (
        lambda: models.reference(model, PROMPT, 4),
        lambda: model.save_pretrained(tmp_path),
        lambda: model.train(),
        lambda: model.requires_grad_(False),
        lambda: setattr(model.config, "use_cache", False),
        lambda: setattr(model.config, "pad_token_id", 3),
        lambda: [setattr(module, "tag", number) for number, module in enumerate(model.modules())],
        lambda: put_back(mlp(model).up_proj),
        lambda: model(torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True),  # leaves hooks
    )
    for change in changes:
        change()
        out = engine.generate(PROMPT, 9, prefix_cache=kept)
        assert (out.token_ids, out.stats.reused_tokens) == (expected, 20)


def test_a_model_that_was_asked_for_hidden_states_is_copied() -> None:
    """transformers leaves hooks in it, which only look."""
    model = model_of()
    model(torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True)
    expected = Engine(TransformersTarget(model)).generate(PROMPT, 9).token_ids
    assert Engine.from_model(model).generate(PROMPT, 9).token_ids == expected


def put_back(linear: Any) -> None:
    """Another weight, and again the one of before."""
    weight = linear.weight
    linear.weight = nn.Parameter(torch.zeros(96, 64))
    linear.weight = weight


def test_keys_of_another_dtype_are_not_rounded() -> None:
    """A layer that was cast by itself computes, by its own modules, keys that its slots would not hold."""
    cache = KVCache([LayerSpec(1, 4, 4, None, torch.device("cpu"), torch.float32)], capacity=4, rows=1)
    keys = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    with pytest.raises(
        TargetError, match=r"layer 0 computes keys in torch.float64, and did so in torch.float32 when its"
    ):
        seam.Text(cache).part([1]).store(keys, keys, 0)


def test_a_head_without_weights() -> None:
    model: Any = model_of()
    model.lm_head = nn.Identity()
    with pytest.raises(TargetError, match="Identity stands in the place of an embedding or a head, and has no weights"):
        TransformersTarget(model)
