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
from specdec.errors import ConfigError, SpecdecWarning, TargetError
from specdec.native import library as native
from specdec.runners.experts import KnownExperts, PackedExperts
from specdec.runners.rows import Rows
from tests import models, seam
from tests.sums import InOrder

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
SIZES = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL: dict[str, Any] = {"max_rows": 24, "prefill_chunk": 16}
COUNTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts"}


def new_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    return models.new_model(family, dtype, **SIZES | changes)


def native_target(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformersTarget:
    return TransformersTarget(new_model(family, dtype, **changes), execution="native", owned=True)


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
    found = models.logits_of(TransformersTarget(model, execution="native", owned=True), tokens).double() - expected
    assert found.abs().mean() < 1.25 * theirs.abs().mean()


def test_layers_with_and_without_experts_go_in_one_call() -> None:
    """Their MLPs have other widths."""
    model = new_model("qwen3_moe", mlp_only_layers=[1], intermediate_size=80)
    expected = models.reference(model, models.prompt_of(7), 30)
    target = TransformersTarget(model, execution="native", owned=True)
    assert str(target.describe()["execution"]["experts"]).startswith("in the same call: 2 of 8 a row in 2 layers")
    assert Engine(target, drafter="lookahead").generate(models.prompt_of(7), 30).token_ids == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("norm_topk", [False, True])
def test_shares_of_a_row_s_experts_add_up_to_one_where_the_router_says_so(norm_topk: bool) -> None:
    model = new_model("qwen3_moe", norm_topk_prob=norm_topk)
    expected = models.reference(model, models.prompt_of(7), 30)
    target = TransformersTarget(model, execution="native")
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
        alone = target.runner.run(hidden, Rows(own.rows(tokens)), 0, 3, ())[0]
        hidden = torch.cat([hidden, torch.full_like(hidden[:1], torch.nan)])
        found = target.runner.run(hidden, Rows(own.rows([*tokens, 3])), 0, 3, ())[0]
    assert torch.equal(found[:-1], alone)
    assert bool(found[-1].isnan().all())


# The model that they replace the weights of.


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_stand_in_the_place_of_experts(family: str, tmp_path: Path) -> None:
    """Where the model is specdec's own; it still computes, saves and copies what it did."""
    model, prompt = new_model(family), models.prompt_of(7)
    plain, expected = copy.deepcopy(model), models.reference(model, prompt, 20)
    target = TransformersTarget(model, execution="native", owned=True)
    packed = [name for name, module in model.named_modules() if isinstance(module, PackedExperts)]
    assert packed == [f"model.layers.{n}.mlp.experts" for n in range(3)]
    assert not any(weight.ndim == 3 for weight in model.parameters())
    assert models.reference(model, prompt, 20) == expected
    again = target.plain_model()
    assert [type(module) for module in again.modules()] == [type(module) for module in plain.modules()]
    own, theirs = dict(target.named_weights()), dict(plain.named_parameters())
    assert own.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(own[name], weight), name
        assert torch.equal(dict(again.named_parameters())[name], weight), name
        assert torch.equal(model.state_dict()[name], weight), name
    assert target.describe()["model"]["parameters"] == sum(weight.numel() for weight in plain.parameters())
    told = target.describe()["execution"]["experts"]
    assert told.startswith(
        f"in the same call: 2 of {len(theirs[f'{packed[0]}.down_proj'])} a row in {len(packed)} layers"
    )
    model.save_pretrained(tmp_path)
    loaded = TransformersTarget.from_pretrained(tmp_path, dtype="float32")
    assert loaded.runner.name == "native"
    assert Engine(loaded).generate(prompt, 20).token_ids == expected


def test_a_model_that_is_handed_in_is_left_as_it_is() -> None:
    model = new_model("mixtral")
    places = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    modules = [*map(id, model.modules())]
    TransformersTarget(model, execution="native")
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == places
    assert [*map(id, model.modules())] == modules


def edit_an_expert(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3].mul_(2)


def edit_a_router(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight.neg_()


def choose_more(model: Any) -> None:
    model.model.layers[0].mlp.gate.top_k = 3


@pytest.mark.few(1)
@pytest.mark.parametrize("edit", [edit_an_expert, edit_a_router, choose_more])
def test_an_edit_after_the_engine_was_built_is_refused(edit: Callable[[Any], None]) -> None:
    model, prompt = new_model("mixtral"), models.prompt_of(7)
    engine = Engine(TransformersTarget(model, execution="native"))
    before = engine.generate(prompt, 20).token_ids
    edit(model)
    assert models.reference(model, prompt, 20) != before
    with pytest.raises(TargetError, match="was changed after its native runner was made"):
        engine.generate(prompt, 20)


def test_clipped_queries_are_run_by_the_model_s_own_modules() -> None:
    with pytest.raises(ConfigError, match="layer 0: self_attn clips queries, keys and values"):
        TransformersTarget(new_model("olmoe", clip_qkv=1.0), execution="native")


def hooked(mlp: Any) -> None:
    mlp.experts.register_forward_hook(lambda module, given, output: 1.5 * output)


def other_router(mlp: Any) -> None:
    mlp.gate.__class__ = type("OwnRouter", (type(mlp.gate),), {})


def other_gate(mlp: Any) -> None:
    mlp.experts.act_fn = nn.GELU()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, r"mlp\.experts \(MixtralExperts\) has hooks"),
        (other_router, r"mlp\.gate is a OwnRouter"),
        (other_gate, r"mlp\.experts\.act_fn is a GELU"),
    ],
)
def test_a_changed_layer_is_run_by_its_own_module(change: Callable[[Any], None], reason: str) -> None:
    model, prompt = new_model("mixtral"), models.prompt_of(7)
    change(model.model.layers[1].mlp)
    expected = models.reference(model, prompt, 20)
    target = TransformersTarget(model, owned=True)
    assert target.runner.name == "modules"
    assert Engine(target).generate(prompt, 20).token_ids == expected
    with pytest.raises(ConfigError, match=f"execution='native' cannot run this model: .*layer 1: {reason}"):
        TransformersTarget(model, execution="native")


# The check at load.


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["an expert more", "shares", "an expert's weights"])
def test_experts_that_differ_are_not_taken(fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "by" if fault == "an expert's weights" else "it chooses otherwise among 4 experts than MixtralTopKRouter"
    of, weights = KnownExperts.of.__func__, KnownExperts.weights  # type: ignore[attr-defined]

    def wrong(cls: type[KnownExperts], block: Any) -> KnownExperts:
        found = of(cls, block)
        more, norm = fault == "an expert more", fault == "shares"
        return KnownExperts(found.place, found.router, found.chosen + more, found.norm_topk ^ norm)

    monkeypatch.setattr(KnownExperts, "of", classmethod(wrong))
    if fault == "an expert's weights":
        monkeypatch.setattr(KnownExperts, "weights", lambda self: (weights(self)[0], weights(self)[1][::-1]))
    warned = pytest.warns(SpecdecWarning, match=f"native layers are not used: its logits differ.* own: {told}")
    if fault == "an expert's weights":  # so that the model has other ones back, and its own forward computes others
        with warned, pytest.raises(TargetError, match="own forward over a tree are not those of each path"):
            TransformersTarget(new_model("mixtral", dtype), owned=True)
        return
    with warned:
        target = TransformersTarget(new_model("mixtral", dtype), owned=True)
    assert target.runner.name == "modules"


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "seed"), [("mixtral", 5), ("qwen3_moe", 11)])
def test_experts_that_rounding_chooses_otherwise_are_not_taken_for_wrong(family: str, seed: int) -> None:
    """On the tokens of the check, a row of these models has another expert by one rounding than by another."""
    model = models.new_model(family, torch.bfloat16, seed=seed, **SIZES)
    assert TransformersTarget(model, execution="native", owned=True).runner.name == "native"
