"""The drafter ``layer_skip``: what it runs, what it leaves out, and how that is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.layer_skip.forward import Skip
from drafters.layer_skip.search import Choice, best_skip, choices, effects, gain, layer_weights, least_change, share_of
from specdec import Engine, SamplingParams
from specdec.costs.curve import roofline
from specdec.drafting.registry import make_drafter
from specdec.errors import CheckpointError, ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.native import library as native
from specdec.step.step_io import NOTHING, Entering, LayerPlan, Part, StepInput
from specdec.target import Forward
from tests import seam
from tests.models import greedy, model_of, new_model, prompt_of, target_for, target_of
from tests.quantised_files import quantised_file

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
PROMPT = prompt_of(9)


def run(target: Any, skip: Skip, rows: Sequence[StepInput]) -> list[Any]:
    """[T, V] the logits of each sequence's rows, without what is skipped."""
    plan = skip.plan(target.num_layers)
    return [output.logits for output in Forward(target, plan)([replace(one, plan=plan) for one in rows])]


def without(model: Any, skip: Skip) -> Any:
    """The model with these sublayers put out of action by hand."""
    for number, layer in enumerate(model.model.layers):
        if number in skip.whole:
            layer.forward = lambda hidden, *_, **__: hidden
        elif number in skip.attention:
            layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
        elif number in skip.mlp:
            layer.mlp.forward = torch.zeros_like
    return model


WIDE: dict[str, Any] = {"head_dim": 16, "intermediate_size": 48}  # as native layers need it


@cache
def packed(family: str = "llama") -> TransformersTarget:
    """A target whose weights are laid out anew."""
    return target_for(new_model(family, torch.float32, **WIDE), execution="native")


SKIPS = [
    *(Skip.of(layers) for layers in ({1}, {0}, {2}, {0, 2}, {0, 1}, {1, 2}, {0, 1, 2})),
    *(Skip.of((), attention=[layer]) for layer in range(3)),
    *(Skip.of((), mlp=[layer]) for layer in range(3)),
    Skip.of([1], attention=[0], mlp=[2]),
    Skip.of([], attention=[0, 1], mlp=[1, 2]),
    Skip.of([], attention=[0, 1, 2]),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("skip", SKIPS, ids=lambda skip: f"a{sorted(skip.attention)} m{sorted(skip.mlp)}")
@pytest.mark.parametrize(
    ("family", "execution"),
    [
        ("llama", "fused"),
        ("qwen2", "fused"),
        pytest.param("llama", "native", marks=needs_compiler),
        pytest.param("gemma2", "native", marks=needs_compiler),
    ],
)
def test_logits_are_those_of_the_model_without_these_parts(family: str, execution: str, skip: Skip) -> None:
    """Of transformers' own model in which they add nothing, run in two blocks and as a tree."""
    is_packed = execution == "native"
    dtype = torch.float32 if is_packed else torch.float64
    target = packed(family) if is_packed else target_of(family, dtype, execution=execution)
    model = without(new_model(family, dtype, **(WIDE if is_packed else {})), skip)
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        expected = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    own = seam.beside(target.specs, capacity=16, rows=8)
    (first,) = run(target, skip, [own.rows(PROMPT[:5])])
    own.commit(range(5))
    tree = (PROMPT[5], 3, *PROMPT[6:9])  # below the root a wrong sibling first
    (second,) = run(target, skip, [own.rows(tree, [-1, 0, 0, 2, 3])])
    # Gemma's own softmax is in float32, whatever the dtype; native layers are.
    close = 1e-4 if is_packed else 1e-5
    torch.testing.assert_close(torch.cat((first, second[[0, 2, 3, 4]])), expected, rtol=0, atol=close)


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mixtral", "qwen3_moe", "blocks", "int8"])
def test_native_halves_make_the_whole_layer(family: str, tmp_path: Path) -> None:
    """Attention alone and then the MLP alone is the layer, bit for bit; also of quantised blocks."""
    if family in ("blocks", "int8"):
        file = quantised_file(tmp_path / "small.gguf", ("Q4_K", "Q6_K", "Q5_0", "Q8_0"))
        rounded = "int8" if family == "int8" else "default"
        target = TransformersTarget.from_pretrained(file, dtype="float32", activations=rounded)
    else:
        model = new_model(family, torch.float32, **WIDE)
        target = target_for(model, execution="native")
    assert target.options["runner"] == "native"
    own, other = (seam.text(target, capacity=16, rows=8) for _ in range(2))
    for tokens in (PROMPT[:5], PROMPT[5:9]):
        given = target.embed(tokens)
        for layer in range(target.num_layers):
            entry = Entering(layer, given)
            whole = own.run(tokens, entry=entry, exit_layer=layer + 1, rows=()).out
            got = given
            for part in (Part.ATTENTION, Part.MLP):
                plan, entry = LayerPlan(layer + 1, (part,) * target.num_layers), Entering(layer, got)
                got = target.forward(other.rows(tokens, plan=plan, wanted=NOTHING, entry=entry)).out
            assert torch.equal(got, whole)
            given = whole
        own.commit(range(len(tokens)))
        other.commit(range(len(tokens)))


def test_several_sequences_share_a_pass_through_half_layers() -> None:
    target = target_of("llama")
    skip = Skip.of([1], attention=[0], mlp=[2])
    prompts = [PROMPT[:5], PROMPT[3:], PROMPT[:2]]

    def rows() -> list[Any]:
        return [seam.beside(target.specs, capacity=16, rows=8).rows(prompt) for prompt in prompts]

    for alone, together in zip((run(target, skip, [one])[0] for one in rows()), run(target, skip, rows()), strict=True):
        torch.testing.assert_close(alone, together)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_no_token_depends_on_what_is_left_out(family: str) -> None:
    """Greedy and drawn, alone and in a batch, with sublayers of every kind left out."""
    target, other = target_of(family), prompt_of(5)
    options = {"skip": [0], "skip_attention": [1], "skip_mlp": [2], "rows": 9, "min_chance": 0.01}
    engine = Engine(target, None, {"name": "layer_skip", **options}, max_rows=24)
    assert engine.generate(PROMPT, 20).token_ids == greedy(family, PROMPT, 20)
    hot = SamplingParams(temperature=0.9, seed=2, acceptance="match")
    plain = [Engine(target).generate(prompt, 20, hot).token_ids for prompt in (PROMPT, other)]
    assert [one.token_ids for one in engine.generate_batch([PROMPT, other], 20, hot)] == plain


def test_runs_are_as_few_as_can_be() -> None:
    assert Skip.of([2], attention=[3], mlp=[4, 5]).plan(8).runs(0, 8) == [
        (Part.BOTH, 0, 2), (Part.MLP, 3, 4), (Part.ATTENTION, 4, 6), (Part.BOTH, 6, 8)
    ]  # fmt: skip
    assert Skip.of([0, 1]).plan(2).runs(0, 2) == []


@pytest.mark.parametrize("saved", [0.2, 0.5, 0.7])
def test_the_parts_that_change_least_are_found(saved: float) -> None:
    """By trying all ways, with made-up times: a half may take longer alone than its whole layer, and one is dear."""
    changes = [(0.9, 0.5, 0.5), (0.3, 0.05, 0.27), (0.1, 0.09, 0.02), (0.25, 0.2, 0.1), (0.8, 0.3, 0.6)]
    times = [(2.0, 1.0, 1.0), (2.0, 1.0, 1.0), (2.0, 2.0, 3.0), (6.0, 1.0, 5.0), (2.0, 1.0, 1.0)]
    layers = [
        [
            Choice(0.0, whole),
            Choice(change, 0.0, True, True),
            Choice(mlp, attends, mlp=True),
            Choice(attention, rest, attention=True),
        ]
        for (change, attention, mlp), (whole, attends, rest) in zip(changes, times, strict=True)
    ]
    total = sum(whole for whole, _, _ in times)
    enough = [own for own in product(*layers) if total - sum(one.weights for one in own) >= saved * total - 1e-9]
    best = min(enough, key=lambda own: sum(one.change for one in own))
    assert least_change(layers, saved) == [*best]


def silent(*parts: str) -> TransformersTarget:
    """A target of which these parts add nothing."""
    model: Any = new_model("llama")
    for part in parts:
        model.get_submodule(f"model.layers.{part}").weight.data.zero_()
    return target_for(model, execution="fused")


def test_parts_that_do_nothing_are_left_out() -> None:
    target = silent("1.self_attn.o_proj", "2.mlp.down_proj")
    found, _ = effects(target, PROMPT)
    assert [one.attention for one in found][1] == pytest.approx(0, abs=1e-6)
    assert [one.mlp for one in found][2] == pytest.approx(0, abs=1e-6)
    assert all(one.layer > 0.01 for one in found)
    assert best_skip(target, PROMPT, 4) == Skip.of((), attention=[1], mlp=[2])
    out = Engine(target, None, {"name": "layer_skip", "branch": 1, "min_chance": 0.0}).generate(PROMPT, 25)
    assert out.stats.acceptance_lengths == [5] * 5  # such a draft is the model itself
    whole = silent("1.self_attn.o_proj", "1.mlp.down_proj")
    assert best_skip(whole, PROMPT, 4) == Skip.of([1])


def test_a_larger_share_has_to_be_worth_it() -> None:
    assert gain(0.9, 0.5, 4) > gain(0.5, 0.3, 4)
    assert gain(0.8, 0.8, 4) < 1  # a chain that costs nearly plain steps loses
    assert gain(1.0, 0.25, 4) == pytest.approx(2.5)


@pytest.mark.slow
def test_a_choice_is_kept_for_later_texts_but_where_the_text_depends_on_it() -> None:
    target = target_of("llama")
    drafter: Any = make_drafter({"name": "layer_skip", "min_chance": 0.0}, target)
    engine = Engine(target, None, drafter, costs=roofline())
    assert drafter.chosen is None
    sampled = SamplingParams(temperature=0.9, seed=1, acceptance="reject")
    first = engine.generate(PROMPT, 12, sampled).token_ids
    assert drafter.chosen is None
    assert engine.generate(PROMPT, 12).token_ids == greedy("llama", PROMPT, 12)
    assert drafter.chosen == best_skip(target, PROMPT, 4)
    drafter.chosen = Skip.of([0, 1])  # as another text may have had it
    assert engine.generate(PROMPT, 12, sampled).token_ids == first


def test_weights_stand_for_times() -> None:
    target, model = target_of("llama"), model_of("llama")
    for (attention, others), layer in zip(layer_weights(target), model.model.layers, strict=True):
        assert attention == sum(weight.numel() for weight in layer.self_attn.parameters())
        assert attention + others == sum(weight.numel() for weight in layer.parameters())


@pytest.mark.parametrize("execution", ["fused", pytest.param("native", marks=needs_compiler)])
def test_a_pass_costs_what_runs(execution: str) -> None:
    target = packed() if execution == "native" else target_of("llama")
    assert target.layer_weights == sum(map(sum, layer_weights(target)))
    each = layer_weights(target)
    (attention, mlp), *_ = each
    head = target.vocab_size * target.hidden_size
    whole = sum(map(sum, each)) + head
    assert share_of(target, Skip()) == pytest.approx(1)
    assert share_of(target, Skip.of([0])) == pytest.approx(1 - (attention + mlp) / whole)
    assert share_of(target, Skip.of((), mlp=[0])) == pytest.approx(1 - mlp / whole)
    assert share_of(target, Skip.of([1], attention=[0])) == pytest.approx(1 - (sum(each[1]) + attention) / whole)
    found = choices(effects(target, PROMPT)[0], each)
    assert all(len(own) == 4 and own[2].weights + own[3].weights == own[0].weights for own in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": [3]}, r"layer_skip.skip is \[3\], and the model has 3 layers"),
        ({"skip": [0, 1, 2]}, "at least one is run"),
        ({"skip": [1, 1]}, "each once"),
        ({"skip": [-1]}, "counted from 0"),
        ({"skip": [1], "exit_layer": 2}, "give one of them"),
        ({"skip_mlp": [1], "exit_layer": 2}, r"layer_skip.skip_mlp is \[1\]; give one of them"),
        ({"skip_attention": [0, 7]}, r"layer_skip.skip_attention is \[0, 7\], and the model has 3 layers"),
        ({"skip_mlp": [1, 1]}, "skip_mlp is .* each once"),
        ({"skip_attention": [0, 1, 2], "skip_mlp": [2], "skip": [0, 1]}, "at least one is run"),
        ({"min_chance": 2.0}, "layer_skip.min_chance is 2"),
        ({"tokens": 0}, "layer_skip.tokens"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_drafter({"name": "layer_skip", **options}, target_of("llama"))


def test_an_exit_behind_the_last_layer_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the exit layer must be in \[1, 2\]"):
        make_drafter({"name": "layer_skip", "exit_layer": 3}, target_of("llama"))
