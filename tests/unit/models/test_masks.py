"""How far attention reaches: read from the masks that models make, where their attention functions are not told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from specdec import Engine, TransformersTarget
from specdec.errors import TargetError
from specdec.models.inspection import refuse_unfit
from tests.models import BOS, VOCAB, prompt_of, reference

MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
WINDOW = 16  # more than the few tokens of the check at load
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def new_model(kind: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    model: PreTrainedModel = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Qwen2Moe", {"use_sliding_window": True, "layer_types": MIXED}),
        ("Qwen2Moe", {"use_sliding_window": False, "layer_types": MIXED[:1] * 3}),
        ("Phimoe", {}),
        # recurrent layers, of which it has none, would read in chunks
        ("GraniteMoeHybrid", {"layer_types": MIXED[:1] * 3, "mamba_n_heads": 4, "num_local_experts": 0}),
    ],
)
def test_windows_that_only_the_mask_knows(kind: str, options: dict[str, Any]) -> None:
    model, prompt = new_model(kind, **options), prompt_of(40)
    expected = reference(model, prompt, 30)
    target = TransformersTarget(model)
    for drafter in ("none", "prompt_lookup"):
        assert Engine(target, drafter=drafter).generate(prompt, 30).token_ids == expected
    assert model.config._attn_implementation == "sdpa"


def own_mask(module: nn.Module, arguments: Any, options: dict[str, Any]) -> Any:
    """As of a model that makes its masks without transformers' helpers."""
    mask = options["attention_mask"]
    return arguments, {**options, "attention_mask": None if mask is None else mask.clone()}


def test_a_mask_that_says_nothing_is_believed_without_limits_alone() -> None:
    model, prompt = new_model("Phimoe", sliding_window=None), prompt_of(40)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(own_mask, with_kwargs=True)
    assert Engine(TransformersTarget(model)).generate(prompt, 20).token_ids == reference(model, prompt, 20)
    model.config.local_window = 4096
    with pytest.raises(TargetError, match=r"makes its masks itself, and its config says local_window=4096: .* refused"):
        TransformersTarget(model)


def test_attention_that_chooses_its_keys_is_refused() -> None:
    with pytest.raises(TargetError, match=r"Phimoe attends to the keys that score best \(index_topk=128\)"):
        refuse_unfit("Phimoe", new_model("Phimoe", index_topk=128).config)
    refuse_unfit("Phimoe", new_model("Phimoe", index_topk=256).config)  # as many as the context holds
