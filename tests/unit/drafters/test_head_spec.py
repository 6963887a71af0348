"""What heads are said to compute is what their configs mean to transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.heads.config import ACTIVATIONS, BlockConfig, ChainConfig
from drafters.heads.forward import HeadForward
from drafters.heads.native_parts import runs
from drafters.heads.spec import check_positions, head_spec
from drafters.heads.weights import Chain
from specdec.decoder.rope import RopeTables
from specdec.errors import CheckpointError
from specdec.execute.layer import layer_around
from specdec.runners.linear import DenseLinear
from specdec.step.step_io import Part

SIZES: dict[str, Any] = {"heads": 2, "key_heads": 1, "head_dim": 16, "layers": 1, "taps": [0]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def chain(**changes: Any) -> ChainConfig:
    sizes = {"hidden_size": 32, "width": 32, "vocab_size": 40, "intermediate_size": 48, **SIZES}
    return ChainConfig(**{"kind": "eagle3", **sizes, **changes})


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {**LLAMA3, "rope_theta": 5e5},
        {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128},
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    ],
)
def test_positions_are_transformers_to_the_bit(rope: dict[str, Any]) -> None:
    config = chain(rope=rope, positions=512)
    found = RopeTables(torch.float32, torch.device("cpu")).whole(head_spec(config).layers[0].attention.rope, 512)
    like = LlamaConfig(
        hidden_size=32, num_attention_heads=2, head_dim=16, max_position_embeddings=512, rope_parameters=rope or None
    )
    cos, sin = LlamaRotaryEmbedding(like)(torch.zeros(1), torch.arange(512)[None])
    assert torch.equal(found.cos[:512], cos[0])
    assert torch.equal(found.signed_sin[:512].abs(), sin[0].abs())
    assert torch.equal(found.signed_sin[:512, 8:], sin[0, :, 8:])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_mlp_has_the_activation_that_its_config_names(name: str) -> None:
    config = chain(activation=name)
    head, spec = Chain(config, 1).double(), head_spec(config)
    forward = HeadForward.of(spec, head.state_dict(), DenseLinear)
    rows = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = layer_around(spec.layers[0], forward.layers[0], rows, lambda reads: reads, Part.MLP)
    mlp: Any = head.layers[0].mlp
    normed = torch.nn.functional.rms_norm(rows, (32,), eps=config.norm_eps)
    expected = rows + mlp.down_proj(ACT2FN[name](mlp.gate_proj(normed)) * mlp.up_proj(normed))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    rows.requires_grad_()
    grad = torch.autograd.grad(layer_around(spec.layers[0], forward.layers[0], rows, torch.clone, Part.MLP).sum(), rows)
    assert grad[0].isfinite().all(), "training goes back through it"
    assert runs(spec) == (name in ("silu", "swish"))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_are_refused_beyond_it(kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    config = chain(rope=rope, positions=256)
    check_positions(config, 128)
    with pytest.raises(CheckpointError, match=f"{kind}.*beyond 128 tokens, and its target reads 129"):
        check_positions(config, 129)
    check_positions(chain(rope={**rope, "rope_type": "linear"}, positions=256), 129)


def test_positions_of_a_part_of_a_head_are_refused() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(CheckpointError, match="turn 8 of the 16 values"):
        head_spec(chain(rope=rope))


def test_blocks_cache_the_whole_text_whatever_their_windows() -> None:
    sizes = {"hidden_size": 32, "width": 32, "vocab_size": 40, "intermediate_size": 48, **SIZES}
    block = BlockConfig(kind="dflash", block_size=4, mask_token=1, windows=[3], **sizes)
    assert head_spec(block).layers[0].attention.window is None
    assert head_spec(chain(windows=[3])).layers[0].attention.window == 3
