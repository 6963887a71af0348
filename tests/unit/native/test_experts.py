"""Experts in native layers: transformers' own numbers, and a row's the same, bit for bit, in any company."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from specdec import Engine, TransformersTarget
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.errors import TargetError
from specdec.native import library as native
from specdec.step.step_io import Entering
from tests import models, seam
from tests.models import target_for
from tests.sums import InOrder

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL: dict[str, Any] = {"max_rows": 24, "prefill_chunk": 16}
COUNTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts"}


def new_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    return models.new_model(family, dtype, **SIZES | changes)


def native_target(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformersTarget:
    return target_for(new_model(family, dtype, **changes), execution="native")


@pytest.mark.few(1)
@pytest.mark.parametrize("chosen", [1, 2, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, chosen: int) -> None:
    """Of one expert, of some and of all, up to the rounding of transformers' own layers whose sums run in order."""
    model = new_model(family, num_experts_per_tok=chosen, **{COUNTS[family]: 7})
    model.config._experts_implementation = "eager"
    for weight in model.parameters():
        if weight.ndim == 1:  # of norms
            nn.init.uniform_(weight, 0.5, 1.5)
    tokens, exact = models.prompt_of(40), copy.deepcopy(model).double()
    with torch.inference_mode():
        expected = exact(torch.tensor([tokens])).logits[0]
        model.set_attn_implementation("eager")
        with InOrder():
            theirs = model(torch.tensor([tokens])).logits[0].double() - expected
    found = models.logits_of(target_for(model, execution="native"), tokens).double() - expected
    assert found.abs().mean() < 1.25 * theirs.abs().mean()


def test_layers_with_and_without_experts_go_in_one_call() -> None:
    """Their MLPs have other widths."""
    model = new_model("qwen3_moe", mlp_only_layers=[1], intermediate_size=80)
    expected = models.reference(model, models.prompt_of(7), 30)
    target = target_for(model, execution="native")
    assert str(target.describe()["execution"]["experts"]).startswith("in the same call: 2 of 8 a row in 2 layers")
    assert Engine(target, drafter="lookahead").generate(models.prompt_of(7), 30).token_ids == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("norm_topk", [False, True])
def test_shares_of_a_row_s_experts_add_up_to_one_where_the_router_says_so(norm_topk: bool) -> None:
    model = new_model("qwen3_moe", norm_topk_prob=norm_topk)
    expected = models.reference(model, models.prompt_of(7), 30)
    target = target_for(model, execution="native")
    assert Engine(target).generate(models.prompt_of(7), 30).token_ids == expected
    assert models.reference(new_model("qwen3_moe", norm_topk_prob=not norm_topk), models.prompt_of(7), 30) != expected


@pytest.mark.few(1)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_s_bits_do_not_depend_on_the_rows_beside_it(family: str, dtype: torch.dtype, threads: int) -> None:
    """By up to 32 rows, some of which share an expert; also by two threads."""
    target, tokens = native_target(family, dtype, **{COUNTS[family]: 5}), models.prompt_of(40)
    alone, before = models.logits_of(target, tokens, 1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for chunk in (*range(2, 33), 40) if threads == 1 else (2, 5, 11, 32):
            assert torch.equal(models.logits_of(target, tokens, chunk), alone), chunk
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    target, tokens = native_target("mixtral", dtype), models.prompt_of(9)
    with target.active():
        own, hidden = seam.text(target), target.embed(tokens)
        alone = target.forward(own.rows(tokens, entry=Entering(0, hidden))).out
        hidden = torch.cat([hidden, torch.full_like(hidden[:1], torch.nan)])
        found = target.forward(own.rows([*tokens, 3], entry=Entering(0, hidden))).out
    assert torch.equal(found[:-1], alone)
    assert bool(found[-1].isnan().all())


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_come_out_as_they_went_in(family: str, tmp_path: Path) -> None:
    model, prompt = new_model(family), models.prompt_of(7)
    expected = models.reference(model, prompt, 20)
    model.save_pretrained(tmp_path)
    target = TransformersTarget.from_pretrained(tmp_path, dtype="float32")
    assert target.options["runner"] == "native"
    own, theirs = dict(target.named_weights()), dict(model.named_parameters())
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], weight) for name, weight in theirs.items())
    told = target.describe()
    assert told["model"]["parameters"] == sum(weight.numel() for weight in model.parameters())
    count = len(theirs["model.layers.0.mlp.experts.down_proj"])
    assert told["execution"]["experts"].startswith(f"in the same call: 2 of {count} a row in 3 layers")
    assert Engine(target).generate(prompt, 20).token_ids == expected


def choose_more(mlp: Any) -> None:
    mlp.gate.top_k = 3


def hooked(mlp: Any) -> None:
    mlp.experts.register_forward_hook(lambda module, given, output: 1.5 * output)


def other_router(mlp: Any) -> None:
    mlp.gate.__class__ = type("OwnRouter", (type(mlp.gate),), {})


def other_gate(mlp: Any) -> None:
    mlp.experts.act_fn = nn.GELU()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (choose_more, r"mlp\.gate \(MixtralTopKRouter\) chooses 3 experts, not as its config says"),
        (hooked, r"mlp\.experts \(MixtralExperts\) has hooks"),
        (other_router, r"mlp\.gate is a OwnRouter of"),
        (other_gate, "model.layers.1.mlp.experts.act_fn is a GELU, and not as its class makes it"),
    ],
)
def test_a_changed_mixture_is_followed_and_not_copied(change: Callable[[Any], None], reason: str) -> None:
    model, prompt = new_model("mixtral"), models.prompt_of(7)
    change(model.model.layers[1].mlp)
    expected = models.reference(model, prompt, 20)
    assert Engine(TransformersTarget(model)).generate(prompt, 20).token_ids == expected
    with pytest.raises(TargetError, match=reason):
        Engine.from_model(model)


def test_clipped_queries_are_not_described() -> None:
    with pytest.raises(TargetError, match=r"OlmoeConfig says clip_qkv 1\.0"):
        Engine.from_model(new_model("olmoe", clip_qkv=1.0))


# The check of a copy.


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("execution", ["native", "fused"])
def test_experts_that_differ_are_not_taken(execution: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    each = Checkpoint.experts
    monkeypatch.setattr(Checkpoint, "experts", lambda *where: reversed([*each(*where)]))
    with pytest.raises(TargetError, match="computes other logits than the model itself: by"):
        target_for(new_model("mixtral", dtype), execution=execution)


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "seed"), [("mixtral", 5), ("qwen3_moe", 11)])
def test_experts_that_rounding_chooses_otherwise_are_not_taken_for_wrong(family: str, seed: int) -> None:
    """On the tokens of the check, a row of these models has another expert by one rounding than by another."""
    model = models.new_model(family, torch.bfloat16, seed=seed, **SIZES)
    assert target_for(model, execution="native").options["runner"] == "native"
