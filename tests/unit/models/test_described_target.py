"""A checkpoint as a target by its spec: whole texts are the model's own; and a live model is copied, or refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

from specdec import TransformersTarget
from specdec.drafting.registry import make_drafter
from specdec.errors import ConfigError, TargetError
from specdec.models.described_target import DescribedTarget
from specdec.native.library import library
from tests import models
from tests.bitsandbytes_files import bitsandbytes_checkpoint
from tests.decoders import ALL
from tests.exactness.targets import engine_of
from tests.int4_files import int4_checkpoint

PROMPT, NEW = (3, 9, 4, 3, 9, 4, 11, 3, 9), 24
DRAFTERS = ("prompt_lookup", "lookahead", "token_recycling", "kangaroo", "medusa", "jacobi")


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ALL)
def test_texts_are_those_of_generate(family: str, tmp_path: Path) -> None:
    """By each drafter in turn; windows, experts and soft caps among the families."""
    model = models.new_model(family)
    model.save_pretrained(tmp_path / "model")
    target = TransformersTarget.from_pretrained(tmp_path / "model")
    drafter = DRAFTERS[ALL.index(family) % len(DRAFTERS)]
    (tmp_path / "drafter").mkdir()
    settings = models.settings_of(drafter, target, tmp_path / "drafter")[0]
    found = engine_of(target, make_drafter(settings, target), max_rows=24).generate(PROMPT, NEW)
    assert [*found.token_ids] == models.reference(model, PROMPT, NEW)


def test_what_it_is_is_told(tmp_path: Path) -> None:
    model = models.new_model("gemma3", torch.bfloat16, eos_token_id=[5, 7])
    model.save_pretrained(tmp_path)
    target = TransformersTarget.from_pretrained(tmp_path, execution="fused")
    assert isinstance(target, DescribedTarget)
    assert (target.dtype, target.eos_ids, target.context_length) == (torch.bfloat16, {5, 7}, 256)
    told, live = target.describe(), TransformersTarget(model)
    assert told["execution"]["runner"] == "fused"
    assert told["execution"]["batch-invariant"] == "yes" or library() is None
    assert (target.name, target.layer_weights, target.path) == (live.name, live.layer_weights, str(tmp_path))
    assert told["model"]["parameters"] == live.describe()["model"]["parameters"]
    assert [spec.window for spec in target.specs] == models.WINDOWS["gemma3"]


def test_what_the_library_does_not_run_is_refused(tmp_path: Path) -> None:
    models.new_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="execution='native' cannot run this model: native products compute in"):
        TransformersTarget.from_pretrained(tmp_path, execution="native")


_MIXTURES = ("mixtral", "exaone_moe", "gpt_oss", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "qwen2_moe")


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["llama", "gemma3", *_MIXTURES])
def test_a_live_model_is_copied(family: str) -> None:
    """And later changes of it are not followed."""
    model = models.new_model(family)
    expected = models.reference(model, PROMPT, NEW)
    target = DescribedTarget.from_model(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert [*engine_of(target, "prompt_lookup").generate(PROMPT, NEW).token_ids] == expected


def hooked(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = Other()


def cast(model: Any) -> None:
    model.to(torch.bfloat16).to(torch.float64)


def scaled(model: Any) -> None:
    model.model.layers[2].self_attn.scaling *= 2


def test_a_router_that_chooses_otherwise_is_refused() -> None:
    model: Any = models.new_model("mixtral")
    model.model.layers[1].mlp.gate.top_k = 3
    with pytest.raises(TargetError, match=r"layers.1.mlp.gate \(MixtralTopKRouter\) chooses 3 experts"):
        DescribedTarget.from_model(model)


class Other(torch.nn.SiLU):
    """Of no class of torch's or transformers'."""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (hooked, r"model.layers.1.mlp \(LlamaMLP\) has hooks"),
        (replaced, "model.layers.0.mlp.act_fn is a Other of tests"),
        (cast, "model.rotary_emb.inv_freq is torch.float64, and not what its config says"),
        (scaled, r"model.layers.2.self_attn has scaling 0.7\d+, and by its config 0.3"),
        (lambda model: model.model.embed_tokens.float(), "its weights are of several dtypes: float32, float64"),
    ],
)
def test_a_live_model_that_is_not_as_its_class_makes_it_is_refused(change: Callable[[Any], None], says: str) -> None:
    model = models.new_model("llama")
    change(model)
    with pytest.raises(TargetError, match=says):
        DescribedTarget.from_model(model)


def test_attention_of_one_s_own_is_not_copied() -> None:
    AttentionInterface.register("mine", sdpa_attention_forward)
    model = models.new_model("llama")
    model.set_attn_implementation("sdpa")
    DescribedTarget.from_model(model)
    AttentionInterface.register("mine", lambda *args, **more: sdpa_attention_forward(*args, **more))
    model.set_attn_implementation("mine")
    with pytest.raises(TargetError, match="its attention is 'mine', which is none of transformers'"):
        DescribedTarget.from_model(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_copy_that_computes_otherwise_is_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As code of transformers that was replaced does; rounding alone is no reason."""
    model = models.new_model("llama", dtype)
    DescribedTarget.from_model(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda query, key, *_: (query, key))
    with pytest.raises(TargetError, match="a copy of this LlamaForCausalLM computes other logits than the model"):
        DescribedTarget.from_model(model)


def test_a_copy_needs_the_model_no_more() -> None:
    model = models.new_model("llama", torch.float32)
    weights = [weakref.ref(weight.untyped_storage()) for weight in model.parameters()]
    target = DescribedTarget.from_model(model)
    before = models.logits_of(target, PROMPT)
    for weight in model.parameters():
        weight.data.zero_()
    assert torch.equal(models.logits_of(target, PROMPT), before)
    del model, weight
    gc.collect()
    assert not any(weight() for weight in weights)


@pytest.mark.skipif(library() is None, reason="no C compiler works here")
@pytest.mark.parametrize("kind", ["gptq", "awq", "nf4", "int8"])
def test_quantised_weights_stay_in_their_blocks(kind: str, tmp_path: Path) -> None:
    """Without native layers they are what they stand for."""
    family = "qwen2" if kind in ("awq", "int8") else "llama"
    if kind in ("gptq", "awq"):
        int4_checkpoint(tmp_path, method=kind, family=family, group_size=64)
    else:
        bitsandbytes_checkpoint(tmp_path, kind=kind, family=family)
    blocks = TransformersTarget.from_pretrained(tmp_path, dtype=torch.float32, execution="native")
    dense = TransformersTarget.from_pretrained(tmp_path, dtype=torch.float32, execution="fused")
    found = [models.logits_of(target, [*PROMPT, *PROMPT], chunk=5) for target in (blocks, dense)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    known = dict(dense.named_weights())
    assert all(torch.equal(weight, known[name]) for name, weight in blocks.named_weights())
