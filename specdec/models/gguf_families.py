"""Architectures of GGUF files: what their settings are in transformers' words, one function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.models.gguf_features import (
    biases,
    dense,
    expert_width,
    experts,
    kinds_of_layers,
    layer_norm,
    no_experts,
    no_sections,
    rms_norm,
    turns,
    windowed,
)
from specdec.models.gguf_rope import read_rope, rope_base
from specdec.models.gguf_settings import GgufSettings

__all__ = ["FAMILIES"]


def _llama(said: GgufSettings) -> dict[str, Any]:
    if said.number("expert_count", 0):
        mixed = {"model_type": "mixtral", **experts(said, "num_local_experts")}
        return {**mixed, "sliding_window": None, **rms_norm(said), **turns(said)}
    return {**dense(said, "llama"), **biases(said), **turns(said)}


def _qwen2(said: GgufSettings) -> dict[str, Any]:
    return {**dense(said, "qwen2"), "use_sliding_window": False, **turns(said)}


def _qwen3(said: GgufSettings) -> dict[str, Any]:
    own = {"attention_bias": biases(said)["attention_bias"], "use_sliding_window": False}
    return {**dense(said, "qwen3"), **own, **turns(said)}


def _qwen2moe(said: GgufSettings) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        **experts(said, "num_experts"),
        "moe_intermediate_size": expert_width(said),
        "shared_expert_intermediate_size": said.number(
            "expert_shared_feed_forward_length", said.number("feed_forward_length")
        ),
        "norm_topk_prob": False,
        "use_sliding_window": False,
        **rms_norm(said),
        **turns(said),
    }


def _qwen3moe(said: GgufSettings) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        **experts(said, "num_experts"),
        "moe_intermediate_size": expert_width(said),
        "norm_topk_prob": True,
        "use_sliding_window": False,
        **rms_norm(said),
        **turns(said),
    }


def _gemma(said: GgufSettings) -> dict[str, Any]:
    return {**dense(said, "gemma"), "hidden_act": "gelu_pytorch_tanh", **turns(said)}


def _windowed_gemma(said: GgufSettings, model_type: str, largest: int, every: int) -> dict[str, Any]:
    """Attention's scale, and layers with a window.

    Args:
        said: the file's settings.
        model_type: transformers' name of the family.
        largest: layers of the size whose attention is scaled by its width.
        every: each ``every``-th layer is global.
    """
    (heads, dim), width, layers = said.heads, said.number("embedding_length"), said.number("block_count")
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        said.only(name, dim)
    scale = width // heads if layers == largest else dim
    return {**dense(said, model_type), "query_pre_attn_scalar": scale, **kinds_of_layers(windowed(said, every))}


def _gemma2(said: GgufSettings) -> dict[str, Any]:
    said.only("rope.freq_base_swa", rope_base(said))
    return {
        **_windowed_gemma(said, "gemma2", 46, 2),
        "sliding_window": said.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": said.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.number("final_logit_softcapping", 30.0),
        **turns(said),
    }


def _gemma3(said: GgufSettings) -> dict[str, Any]:
    values = _windowed_gemma(said, "gemma3_text", 62, 6)
    window = said.number("attention.sliding_window", 0)
    if not window:  # then all layers are global
        values["layer_types"] = ["full_attention"] * len(values["layer_types"])
    base = float(said.number("rope.freq_base_swa", 10000.0))
    kinds = {
        "full_attention": read_rope(said, said.heads[1]),
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }
    return {
        **values,
        "sliding_window": window or 4096,
        "rope_parameters": kinds,
        "final_logit_softcapping": said.number("final_logit_softcapping", 0) or None,
    }


def _starcoder2(said: GgufSettings) -> dict[str, Any]:
    no_experts(said)
    own = {"norm_epsilon": layer_norm(said), "sliding_window": None}
    return {"model_type": "starcoder2", **own, **turns(said)}


def _phi3(said: GgufSettings) -> dict[str, Any]:
    own = turns(said, partial=True)
    if (rope := own["rope_parameters"])["rope_type"] == "yarn":  # transformers' class takes it for LongRoPE
        raise said.refused("scales its rotary frequencies by YaRN, which is not read of phi3")
    trained = rope.get("original_max_position_embeddings", said.number("context_length"))
    return {**dense(said, "phi3"), "sliding_window": None, "original_max_position_embeddings": trained, **own}


def _granite_scales(said: GgufSettings) -> dict[str, Any]:
    said.only("rope.scaling.finetuned", True)  # llama.cpp's switch between rotary positions and none
    dim = said.heads[1]
    return {
        "logits_scaling": said.number("logit_scale"),
        "residual_multiplier": said.number("residual_scale", 0) or 1.0,
        "embedding_multiplier": said.number("embedding_scale", 0) or 1.0,
        "attention_multiplier": said.number("attention.scale", 0) or dim**-0.5,
        **turns(said),
    }


def _granite(said: GgufSettings) -> dict[str, Any]:
    return {**dense(said, "granite"), **biases(said), **_granite_scales(said)}


def _granitemoe(said: GgufSettings) -> dict[str, Any]:
    shared = said.number("expert_shared_feed_forward_length", 0)
    return {
        "model_type": "granitemoeshared" if shared else "granitemoe",
        **({"shared_intermediate_size": shared} if shared else {}),
        "attention_bias": biases(said)["attention_bias"],
        **experts(said, "num_local_experts"),
        **rms_norm(said),
        **_granite_scales(said),
    }


def _gpt_oss(said: GgufSettings) -> dict[str, Any]:
    said.only("rope.freq_base_swa", rope_base(said))
    return {
        "model_type": "gpt_oss",
        **experts(said, "num_local_experts"),
        "intermediate_size": said.number("expert_feed_forward_length"),
        "sliding_window": said.number("attention.sliding_window"),
        **kinds_of_layers(windowed(said, 2)),
        **rms_norm(said),
        **turns(said),
    }


def _mistral3(said: GgufSettings) -> dict[str, Any]:
    """Its queries grow with their positions where the file says by how much; otherwise it is a Llama."""
    own, growth = turns(said), said.number("attention.temperature_scale", 0)
    if not growth:
        return {**dense(said, "llama"), **biases(said), **own}
    rope = own["rope_parameters"]
    if rope["rope_type"] == "longrope":  # in which these lengths mean something else
        raise said.refused("scales queries, and single frequencies or cosines and sines, which is not read together")
    trained = said.number("rope.scaling.original_context_length", 0) or said.number("context_length")
    rope |= {"llama_4_scaling_beta": growth, "original_max_position_embeddings": trained}
    return {**dense(said, "ministral3"), **own}


def _smollm3(said: GgufSettings) -> dict[str, Any]:
    own = {"no_rope_layer_interval": 4, "use_sliding_window": False}
    return {**dense(said, "smollm3"), **own, **turns(said)}


def _glm4(said: GgufSettings) -> dict[str, Any]:
    no_sections(said)
    own = {"attention_bias": biases(said)["attention_bias"]}
    return {**dense(said, "glm4"), **own, **turns(said, partial=True)}


def _olmo2(said: GgufSettings) -> dict[str, Any]:
    if not (window := said.number("attention.sliding_window", 0)):
        return {**dense(said, "olmo2"), **turns(said)}
    said.only("rope.freq_base_swa", rope_base(said))
    kinds = {
        "full_attention": read_rope(said, said.heads[1]),
        "sliding_attention": {"rope_type": "default", "rope_theta": rope_base(said)},
    }
    own = {"sliding_window": window, "rope_parameters": kinds}
    return {**dense(said, "olmo3"), **own, **kinds_of_layers(windowed(said, 4))}


def _command_r(said: GgufSettings) -> dict[str, Any]:
    no_experts(said)
    return {
        "model_type": "cohere",
        "layer_norm_eps": layer_norm(said),
        "logit_scale": said.number("logit_scale", 0) or 1.0,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in said.names,
        **turns(said),
    }


def _cohere2(said: GgufSettings) -> dict[str, Any]:
    no_experts(said)
    said.only("rope.freq_base_swa", rope_base(said))
    return {
        "model_type": "cohere2",
        "layer_norm_eps": layer_norm(said),
        "logit_scale": said.number("logit_scale") or 1.0,
        "sliding_window": said.number("attention.sliding_window"),
        **kinds_of_layers(windowed(said, 4)),
        **turns(said),
    }


def _seed_oss(said: GgufSettings) -> dict[str, Any]:
    own = {"attention_bias": biases(said)["attention_bias"], "attention_out_bias": False}
    return {**dense(said, "seed_oss"), **own, **turns(said)}


def _exaone4(said: GgufSettings) -> dict[str, Any]:
    layers, window = said.number("block_count"), said.number("attention.sliding_window", 4096)
    said.only("rope.freq_base_swa", rope_base(said))
    local, large = windowed(said, 4), layers == 64  # the one size that has windows, whatever a file says
    kinds = kinds_of_layers(local if large else [False] * layers)
    return {**dense(said, "exaone4"), "sliding_window": window if large else None, **kinds, **turns(said)}


def _ernie(said: GgufSettings) -> dict[str, Any]:
    return {**dense(said, "ernie4_5"), **turns(said)}


def _hunyuan(said: GgufSettings) -> dict[str, Any]:
    no_sections(said)
    dim, own = said.heads[1], turns(said)
    if alpha := said.number("rope.scaling.alpha", 0):
        own["rope_parameters"]["rope_theta"] *= alpha ** (dim / (dim - 2))
    return {**dense(said, "hunyuan_v1_dense"), **own}


def _hunyuan_moe(said: GgufSettings) -> dict[str, Any]:
    said.only("expert_shared_feed_forward_length", said.number("feed_forward_length"))  # both are of one width
    return {
        "model_type": "hunyuan_v1_moe",
        **experts(said, "num_experts"),
        "attention_bias": biases(said)["attention_bias"],
        **rms_norm(said),
        **turns(said),
    }


FAMILIES: dict[str, Callable[[GgufSettings], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "starcoder2": _starcoder2,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "smollm3": _smollm3,
    "mistral3": _mistral3,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "ernie4_5": _ernie,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan_moe,
}
"""Architecture -> what its settings say beyond those of all."""
