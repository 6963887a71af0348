"""Rotary positions: to the bit what transformers' functions compute, in every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.decoder.families import spec_of
from specdec.decoder.rope import RopeTables, frequencies, rotate
from specdec.decoder.rope_settings import read_rope, rope_context
from specdec.decoder.settings import Settings
from specdec.decoder.spec import UnknownDecoder
from specdec.errors import CheckpointError, SpecdecWarning

HEAD, LONGEST = 24, 4096
SHORT = [1.0 + 0.1 * number for number in range(HEAD // 2)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1_000_000},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.3},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 40.0, "beta_fast": 24, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 3.0, "attention_factor": 1.25, "truncate": False, "rope_theta": 150000.0},
    {"rope_type": "longrope", "short_factor": SHORT, "long_factor": SHORT, "original_max_position_embeddings": 512},
    {"rope_type": "longrope", "short_factor": SHORT, "long_factor": SHORT, "factor": 6.0, "attention_factor": 1.1},
]


def config_of(rope: dict[str, Any]) -> LlamaConfig:
    heads = {"hidden_size": 4 * HEAD, "num_attention_heads": 4, "head_dim": HEAD}
    return LlamaConfig(**heads, max_position_embeddings=LONGEST, rope_parameters=dict(rope))


@pytest.mark.filterwarnings("ignore:.*factor")
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}-{len(rope)}-{rope.get('factor')}")
def test_numbers_are_those_of_transformers(rope: dict[str, Any]) -> None:
    config = config_of(rope)
    read = read_rope(Settings.of(config), HEAD)
    if rope["rope_type"] != "default":
        expected, attention = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
        found, multiplied = frequencies(read)
        assert torch.equal(found, expected)
        assert multiplied == attention
    module, positions = LlamaRotaryEmbedding(config), torch.tensor([[0, 1, 5, 6, 511, 300]])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        cos, sin = module(torch.zeros(1, 1, dtype=dtype), positions)
        table = RopeTables(dtype, torch.device("cpu")).whole(read, 512)
        assert torch.equal(table.cos[positions[0]], cos[0])
        first, second = table.signed_sin[positions[0]].chunk(2, -1)
        assert torch.equal(torch.cat((-first, second), -1), sin[0])


def test_each_kind_of_layers_has_its_own() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=7,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    spec = spec_of("gemma3_text", Settings.of(config))
    module, positions = Gemma3RotaryEmbedding(config), torch.arange(64)[None]
    tables = RopeTables(torch.float32, torch.device("cpu"))
    assert len(spec.ropes) == 2
    for kind, layer in zip(config.layer_types, spec.layers, strict=True):
        cos, _ = module(torch.zeros(1, 1), positions, kind)
        assert torch.equal(tables.whole(layer.attention.rope, 64).cos[:64], cos[0])


def test_heads_turn_as_transformers_turns_them() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    read = read_rope(Settings.of(config_of(ROPES[0])), HEAD)
    heads = torch.randn(1, 3, 5, HEAD, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = RopeTables(torch.float64, torch.device("cpu")).whole(read, 5)
    own = type(angles)(angles.cos[:5], angles.signed_sin[:5])
    first, second = own.signed_sin.chunk(2, -1)
    expected, _ = apply_rotary_pos_emb(heads, heads, own.cos[None], torch.cat((-first, second), -1)[None])
    torch.testing.assert_close(rotate(heads, own), expected, rtol=0, atol=1e-15)


def test_a_table_grows_and_keeps_its_numbers() -> None:
    tables, read = RopeTables(torch.float32, torch.device("cpu")), read_rope(Settings.of(config_of(ROPES[5])), HEAD)
    small, large = tables.whole(read, 3), tables.whole(read, 3000)
    assert len(small.cos) < 3000 <= len(large.cos)
    assert torch.equal(large.cos[: len(small.cos)], small.cos)
    assert tables.whole(read, 2000) is large


@pytest.mark.filterwarnings("ignore:.*factor")
@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, LONGEST),
        ({"rope_type": "dynamic", "factor": 4.0}, LONGEST),
        ({"rope_type": "longrope", "short_factor": SHORT, "long_factor": SHORT}, LONGEST),
        (ROPES[-2], 512),
    ],
)
def test_a_text_ends_where_frequencies_would_change(rope: dict[str, Any], context: int) -> None:
    assert rope_context(Settings.of(config_of(rope))) == context


def test_what_cannot_be_read_is_named() -> None:
    values: dict[str, Any] = {"max_position_embeddings": LONGEST}

    def read(**rope: Any) -> Any:
        return read_rope(Settings({**values, "rope_parameters": rope}, where="X"), HEAD)

    with pytest.raises(UnknownDecoder, match="rope_type 'axial'"):
        read(rope_type="axial", rope_theta=1e4)
    with pytest.raises(CheckpointError, match=r"rope_parameters of X says factor None, not a number above 0"):
        read(rope_type="linear", rope_theta=1e4)
    with pytest.raises(CheckpointError, match=r"short_factor \[1.0\], not 12 numbers"):
        read(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=9, short_factor=[1.0])
    with pytest.warns(SpecdecWarning, match=r"says mrope_section \[1\], which the rope_type 'default' does not read"):
        read(rope_type="default", rope_theta=1e4, mrope_section=[1])
    with pytest.raises(CheckpointError, match="has no rope_parameters, but None"):
        read_rope(Settings(values, where="X"), HEAD)
