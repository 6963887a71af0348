"""The drafter ``layer_skip``: what it runs, what it leaves out, and how that is found."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from drafters.layer_skip.forward import SkippedForward
from drafters.layer_skip.search import best_skip, gain, layer_costs, least_change, similarities
from specdec import Engine, SamplingParams
from specdec.drafting.registry import make_drafter
from specdec.errors import CheckpointError, ConfigError
from specdec.models.transformers_target import TransformersTarget
from specdec.step.block import Block
from specdec.step.cache import KVCache
from tests.models import greedy, model_of, new_model, prompt_of, target_of

PROMPT = prompt_of(9)


@pytest.mark.parametrize("skip", [{1}, {0}, {2}, {0, 2}, {0, 1}, {1, 2}, {0, 1, 2}])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_logits_are_those_of_the_model_without_these_layers(family: str, skip: set[int]) -> None:
    """Of transformers' own model whose layers give back what they get, run in two blocks and as a tree."""
    target, model = target_of(family, execution="transformers"), new_model(family)
    for layer in skip:
        model.model.layers[layer].forward = lambda hidden, *_, **__: hidden
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        expected = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    cache = KVCache(target.specs, capacity=16, rows=8)
    run = SkippedForward(target, frozenset(skip))
    (first,) = run([Block(cache, PROMPT[:5])])
    cache.commit(range(5))
    tree = (PROMPT[5], 3, *PROMPT[6:9])  # below the root a wrong sibling first
    (second,) = run([Block(cache, tree, parents=[-1, 0, 0, 2, 3], depths=[0, 1, 1, 2, 3])])
    # Gemma's own softmax is in float32, whatever the dtype.
    torch.testing.assert_close(torch.cat((first, second[[0, 2, 3, 4]])), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("saved", [0.2, 0.5, 0.7])
def test_the_layers_that_change_least_are_found(saved: float) -> None:
    """By trying all sets, with made-up times; those of the middle change least, and one is dear."""
    changes, costs = [0.9, 0.3, 0.1, 0.25, 0.2, 0.8], [1.0, 2.0, 1.0, 6.0, 1.0, 1.0]
    every = [set(chosen) for size in range(7) for chosen in combinations(range(6), size)]
    enough = [own for own in every if sum(costs[layer] for layer in own) >= saved * sum(costs)]
    best = min(enough, key=lambda own: sum(changes[layer] for layer in own))
    assert least_change(changes, costs, saved) == best


def test_a_layer_that_does_nothing_is_left_out() -> None:
    model = new_model("llama")
    for weight in (model.model.layers[1].self_attn.o_proj.weight, model.model.layers[1].mlp.down_proj.weight):
        weight.data.zero_()
    target = TransformersTarget(model)
    found, _ = similarities(target, PROMPT)
    assert found[1] == pytest.approx(1)
    assert max(found[0], found[2]) < 0.99
    assert best_skip(target, PROMPT, 4) == {1}
    out = Engine(target, None, {"name": "layer_skip", "branch": 1, "min_chance": 0.0}).generate(PROMPT, 25)
    assert out.stats.acceptance_lengths == [5] * 5  # such a draft is the model itself


def test_a_larger_share_has_to_be_worth_it() -> None:
    assert gain(0.9, 0.5, 4) > gain(0.5, 0.3, 4)
    assert gain(0.8, 0.8, 4) < 1  # a chain that costs nearly plain steps loses
    assert gain(1.0, 0.25, 4) == pytest.approx(2.5)


def test_a_choice_is_kept_for_later_texts_but_where_the_text_depends_on_it() -> None:
    target = target_of("llama")
    drafter: Any = make_drafter({"name": "layer_skip", "min_chance": 0.0}, target)
    engine = Engine(target, None, drafter)
    assert drafter.chosen is None
    sampled = SamplingParams(temperature=0.9, seed=1, acceptance="reject")
    first = engine.generate(PROMPT, 12, sampled).token_ids
    assert drafter.chosen is None
    assert engine.generate(PROMPT, 12).token_ids == greedy("llama", PROMPT, 12)
    assert drafter.chosen == best_skip(target, PROMPT, 4)
    drafter.chosen = frozenset({0, 1})  # as another text may have had it
    assert engine.generate(PROMPT, 12, sampled).token_ids == first


def test_costs_are_weights() -> None:
    target = target_of("llama")
    costs = layer_costs(target)
    assert costs == [sum(weight.numel() for weight in layer.parameters()) for layer in model_of("llama").model.layers]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": [3]}, r"layer_skip.skip is \[3\], and the model has 3 layers"),
        ({"skip": [0, 1, 2]}, "at least one is run"),
        ({"skip": [1, 1]}, "each once"),
        ({"skip": [-1]}, "counted from 0"),
        ({"skip": [1], "exit_layer": 2}, "give one of them"),
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
