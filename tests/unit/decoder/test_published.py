"""Configs as published checkpoints have them: described without a warning, whatever else stands in them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from transformers import AutoConfig

from specdec.decoder.rope_scaling import Llama3, Yarn
from specdec.decoder.spec import Clamp, DecoderSpec, Experts, Gated, Growth, Rope
from tests.decoders import spec_of_config

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "unsloth_version": "2025.3.18",
    "_name_or_path": "somewhere",
}


def sizes(hidden: int, inner: int, layers: int, heads: int, keys: int, vocab: int, longest: int) -> dict[str, Any]:
    return {
        **{"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab},
        **{"num_attention_heads": heads, "num_key_value_heads": keys, "max_position_embeddings": longest},
    }


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
WINDOWLESS = {"use_sliding_window": False, "max_window_layers": 28, "hidden_act": "silu", "rms_norm_eps": 1e-6}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": (
        "llama",
        {
            **sizes(4096, 14336, 32, 32, 8, 128256, 131072),
            **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5},
            **{"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "rope_theta": 500000.0},
            "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
        },
    ),
    "Mistral 7B v0.1": (
        "mistral",
        {**sizes(4096, 14336, 32, 32, 8, 32000, 32768), "sliding_window": 4096, "rope_theta": 10000.0},
    ),
    "Qwen2.5 7B, long": (
        "qwen2",
        {
            **sizes(3584, 18944, 28, 28, 4, 152064, 32768),
            **{**WINDOWLESS, "sliding_window": 131072, "rope_theta": 1000000.0},
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
    ),
    "Qwen3 8B": (
        "qwen3",
        {
            **sizes(4096, 12288, 36, 32, 8, 151936, 40960),
            **{**WINDOWLESS, "max_window_layers": 36, "sliding_window": None, "head_dim": 128},
            **{"attention_bias": False, "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False},
        },
    ),
    "Qwen3 30B A3B": (
        "qwen3_moe",
        {
            **sizes(2048, 6144, 48, 32, 4, 151936, 40960),
            **{**WINDOWLESS, "max_window_layers": 48, "sliding_window": None, "head_dim": 128},
            **{"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_experts": 128},
            **{"num_experts_per_tok": 8, "norm_topk_prob": True, "output_router_logits": False},
            **{"router_aux_loss_coef": 0.001, "rope_scaling": None, "rope_theta": 1000000.0},
        },
    ),
    "Gemma 2B": (
        "gemma",
        {
            **sizes(2048, 16384, 18, 8, 1, 256000, 8192),
            **{"hidden_act": "gelu", "hidden_activation": None, "head_dim": 256, "rope_scaling": None},
        },
    ),
    "Gemma 2 27B": (
        "gemma2",
        {
            **sizes(4608, 36864, 46, 32, 16, 256000, 8192),
            **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 144},
            **{"head_dim": 128, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
            **{"sliding_window": 4096, "sliding_window_size": 4096, "cache_implementation": "hybrid"},
        },
    ),
    "Gemma 3 1B": (
        "gemma3_text",
        {
            **sizes(1152, 6912, 26, 4, 1, 262144, 32768),
            **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256},
            **{"head_dim": 256, "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": None},
            **{"sliding_window": 512, "sliding_window_pattern": 6, "cache_implementation": "hybrid"},
        },
    ),
    "gpt-oss 20B": (
        "gpt_oss",
        {
            **sizes(2880, 2880, 24, 64, 8, 201088, 131072),
            **{"attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu"},
            **{"initial_context_length": 4096, "num_experts_per_tok": 4, "num_local_experts": 32, "rms_norm_eps": 1e-5},
            **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
            "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
            "rope_scaling": {
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
                **{"rope_type": "yarn", "truncate": False},
            },
        },
    ),
    "Granite 4.0 micro": (
        "granitemoehybrid",
        {
            **sizes(2560, 8192, 40, 40, 8, 100352, 131072),
            **{"attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12},
            **{"hidden_act": "silu", "init_method": "mup", "layer_types": ["attention"] * 40, "logits_scaling": 10},
            **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64},
            **{"mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 80},
            **{"normalization_function": "rmsnorm", "num_experts_per_tok": 0, "num_local_experts": 0},
            **{"position_embedding_type": "rope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5},
            **{"rope_scaling": None, "rope_theta": 10000000, "shared_intermediate_size": 8192},
            "tie_word_embeddings": True,
        },
    ),
    "Ministral 3 8B": (
        "ministral3",
        {
            **sizes(4096, 14336, 34, 32, 8, 131072, 262144),
            **{"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "sliding_window": None},
            "rope_parameters": {
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0},
                **{"rope_type": "yarn", "type": "yarn"},
            },
        },
    ),
    "Hunyuan 7B": (
        "hunyuan_v1_dense",
        {
            **sizes(4096, 14336, 32, 32, 8, 128167, 32768),
            **{"attention_bias": False, "eod_token_id": 127967, "head_dim": 128, "hidden_act": "silu"},
            **{"norm_type": "rms", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "use_qk_norm": True},
            "rope_scaling": {
                **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "type": "dynamic"},
            },
        },
    ),
    "Hunyuan A13B": (
        "hunyuan_v1_moe",
        {
            **sizes(4096, 3072, 32, 32, 8, 128167, 32768),
            **{"attention_bias": False, "eod_token_id": 127967, "head_dim": 128, "hidden_act": "silu"},
            **{"moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "n_group": False, "norm_topk_prob": True},
            **{"norm_type": "rms", "num_experts": 64, "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-5},
            **{"rope_theta": 10000.0, "routed_scaling_factor": False, "use_qk_norm": True},
            "rope_scaling": {
                **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "type": "dynamic"},
            },
        },
    ),
    "Mixtral 8x7B": (
        "mixtral",
        {
            **sizes(4096, 14336, 32, 32, 8, 32000, 32768),
            **{"num_experts_per_tok": 2, "num_local_experts": 8, "router_aux_loss_coef": 0.02, "rope_theta": 1e6},
            **{"sliding_window": None, "output_router_logits": False, "rms_norm_eps": 1e-5},
        },
    ),
    "OLMoE 1B 7B": (
        "olmoe",
        {
            **sizes(2048, 1024, 16, 16, 16, 50304, 4096),
            **{"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False, "num_experts": 64},
            **{"num_experts_per_tok": 8, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01},
        },
    ),
}


def read(name: str) -> DecoderSpec:
    model_type, values = PUBLISHED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return spec_of_config(AutoConfig.for_model(model_type, **COMMON, **values))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_described_without_a_warning(name: str) -> None:
    _, values = PUBLISHED[name]
    spec, own = read(name), read(name).layers[0]
    assert (len(spec.layers), spec.hidden, spec.vocab) == tuple(
        values[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    assert own.attention.heads == values["num_attention_heads"]
    assert own.attention.head_dim == values.get("head_dim", spec.hidden // own.attention.heads)


def test_what_counts_of_them_is_read() -> None:
    llama, long, gemma3 = read("Llama 3.1 8B"), read("Qwen2.5 7B, long"), read("Gemma 3 1B")
    assert llama.layers[0].attention.rope.scaling == Llama3(8.0, 1.0, 4.0, 8192)
    scaling = long.layers[0].attention.rope.scaling
    assert isinstance(scaling, Yarn)
    assert (scaling.factor, scaling.trained, long.layers[0].attention.window) == (4.0, 32768, None)
    assert [layer.attention.window for layer in gemma3.layers[:7]] == [512] * 5 + [None, 512]
    assert [rope.base for rope in gemma3.ropes] == [1e4, 1e6]
    assert read("Gemma 2 27B").layers[1].attention.scale == 144**-0.5
    assert read("Gemma 2B").layers[0].mlp == Gated("gelu_tanh", 16384)
    gpt_oss, granite = read("gpt-oss 20B").layers, read("Granite 4.0 micro")
    assert gpt_oss[0].mlp == Experts("silu", 2880, 32, 4, True, bias=True, clamp=Clamp(1.702, 7.0))
    assert [layer.attention.window for layer in gpt_oss[:2]] == [128, None]
    assert (granite.layers[0].mlp, granite.layers[0].scale) == (Gated("silu", 8192), 0.22)
    assert read("Ministral 3 8B").layers[0].attention.growth == Growth(0.1, 16384)
    assert read("Hunyuan 7B").layers[0].attention.rope == Rope(128, 1e4 * 1000.0 ** (128 / 126))
    assert read("Hunyuan A13B").layers[0].mlp == Experts("silu", 3072, 64, 8, True, shared=3072)
    assert read("Mixtral 8x7B").layers[0].mlp == Experts("silu", 14336, 8, 2, True)
    assert read("OLMoE 1B 7B").layers[0].mlp == Experts("silu", 1024, 64, 8, False)
    assert read("Qwen3 30B A3B").layers[0].mlp == Experts("silu", 768, 128, 8, True)
