"""A decoder layer in torch: gradients pass through all of it, and its parts are the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specdec.decoder.rope import Angles, RopeTables
from specdec.decoder.spec import Norm
from specdec.execute.layer import heads_of, keys_values, layer
from specdec.execute.norm import RmsNorm
from specdec.step.step_io import Part
from tests.decoders import Decoder, checkpoint_of, new_model


def parts_of(family: str) -> tuple[Any, Any, Angles]:
    """A family's first layer, its weights and the positions of three rows."""
    changes = {"hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    executor = Decoder(checkpoint_of(new_model(family, **{**changes, "intermediate_size": 6}))).executor
    spec = executor.spec.layers[0]
    table = RopeTables(torch.float64, torch.device("cpu")).whole(spec.attention.rope, 3)
    return spec, executor._weights.layers[0], Angles(*(values[:3] for values in table))


def mix(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mixtral"])
def test_gradients_pass_through_a_layer(family: str) -> None:
    spec, weights, angles = parts_of(family)
    hidden = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: layer(spec, weights, rows, angles, mix), (hidden,), atol=1e-4)


def test_a_layer_is_its_parts_one_after_the_other() -> None:
    spec, weights, angles = parts_of("gemma3")
    hidden = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    attended = layer(spec, weights, hidden, angles, mix, Part.ATTENTION)
    whole = layer(spec, weights, hidden, angles, mix)
    assert torch.equal(layer(spec, weights, attended, angles, mix, Part.MLP), whole)
    assert torch.equal(layer(spec, weights, hidden, angles, mix, Part(0)), hidden)
    assert not torch.equal(attended, whole)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_keys_and_values_are_those_beside_queries(family: str) -> None:
    spec, weights, angles = parts_of(family)
    rows = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = heads_of(spec.attention, weights, rows, angles)[1:]
    for own, other in zip(keys_values(spec.attention, weights, rows, angles), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-14)


def test_a_norm_may_round_before_it_multiplies() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, weight = torch.randn(5, 8, generator=generator).bfloat16(), torch.randn(8, generator=generator).bfloat16()
    root = torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    twice = weight * (rows.float() * root).bfloat16()
    assert torch.equal(RmsNorm(Norm(1e-6, rounds_first=True), weight)(rows), twice)
    assert not torch.equal(RmsNorm(Norm(1e-6), weight)(rows), twice)
    whole = RmsNorm(Norm(1e-6, rounds_first=True), weight.float())(rows)  # as under autocast
    assert torch.equal(whole, weight.float() * (rows.float() * root).bfloat16())
