"""GGUF: what headers of mixtures of experts say, and of Granite, which is one or none; as of :mod:`.gguf`."""

from __future__ import annotations

from typing import Any

from specdec.decoder.gguf_header import GgufHeader
from specdec.decoder.gguf_said import (
    biased,
    dense,
    experts,
    kinds_of_layers,
    no_sections,
    no_windows,
    rope_base,
    turns,
    windowed,
)

__all__ = [
    "glm4moe",
    "gpt_oss",
    "granite",
    "granitehybrid",
    "granitemoe",
    "hunyuan_moe",
    "olmoe",
    "qwen2moe",
    "qwen3moe",
]

Fields = dict[str, Any]

_SIGMOID = 2  # llama.cpp's number of what chooses experts


def qwen2moe(said: GgufHeader) -> Fields:
    shared = said.number("expert_shared_feed_forward_length", said.number("feed_forward_length"))
    own = experts(said, "qwen2_moe", "num_experts", width="moe_intermediate_size")
    own |= {"shared_expert_intermediate_size": shared, "norm_topk_prob": False, "qkv_bias": True}
    own["decoder_sparse_step"] = 1
    return {**own, **no_windows(said), **turns(said)}


def qwen3moe(said: GgufHeader) -> Fields:
    own = experts(said, "qwen3_moe", "num_experts", width="moe_intermediate_size")
    own |= {"decoder_sparse_step": 1, "norm_topk_prob": True, "use_sliding_window": False}
    own["attention_bias"] = biased(said)
    return {**own, **turns(said)}


def _granite_scales(said: GgufHeader, logits_by: float | None = None) -> Fields:
    said.only("rope.scaling.finetuned", True)  # llama.cpp's switch between rotary positions and none
    dim = said.heads[1]
    return {
        "logits_scaling": logits_by or said.number("logit_scale"),
        "residual_multiplier": said.number("residual_scale", 0) or 1.0,
        "embedding_multiplier": said.number("embedding_scale", 0) or 1.0,
        "attention_multiplier": said.number("attention.scale", 0) or dim**-0.5,
        "attention_bias": biased(said),
        **turns(said),
    }


def granite(said: GgufHeader, logits_by: float | None = None) -> Fields:
    own = {"mlp_bias": biased(said, "ffn_gate", "ffn_up", "ffn_down")}
    return {**dense(said, "granite"), **own, **_granite_scales(said, logits_by)}


def granitehybrid(said: GgufHeader) -> Fields:
    keys = said.get("attention.head_count_kv")
    if recurrent := (keys if isinstance(keys, list) else [keys] * said.layers).count(0):
        raise said.refused(f"has {recurrent} recurrent layers, which specdec does not run", "use another model")
    logits_by = said.number("logit_scale", 0) or 1.0
    return granitemoe(said, logits_by) if said.number("expert_count", 0) else granite(said, logits_by)


def granitemoe(said: GgufHeader, logits_by: float | None = None) -> Fields:
    shared = said.number("expert_shared_feed_forward_length", 0)
    own = experts(said, "granitemoeshared" if shared else "granitemoe", "num_local_experts")
    return {**own, **({"shared_intermediate_size": shared} if shared else {}), **_granite_scales(said, logits_by)}


def gpt_oss(said: GgufHeader) -> Fields:
    said.only("rope.freq_base_swa", rope_base(said))
    own = experts(said, "gpt_oss", "num_local_experts")
    own["intermediate_size"] = said.number("expert_feed_forward_length")
    own |= {"sliding_window": said.number("attention.sliding_window"), "attention_bias": True}
    own |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as llama.cpp has it, for which there is no key
    return {**own, **kinds_of_layers(windowed(said, 2)), **turns(said)}


def glm4moe(said: GgufHeader) -> Fields:
    no_sections(said)
    said.only("expert_gating_func", _SIGMOID, 0)
    own = experts(said, "glm4_moe", "n_routed_experts", width="moe_intermediate_size")
    own |= {"n_group": 1, "topk_group": 1, "n_shared_experts": said.number("expert_shared_count")}
    own |= {"routed_scaling_factor": said.number("expert_weights_scale", 0) or 1.0}
    own |= {"norm_topk_prob": bool(said.get("expert_weights_norm", False))}
    own |= {"first_k_dense_replace": said.number("leading_dense_block_count", 0)}
    own |= {"use_qk_norm": "blk.0.attn_q_norm.weight" in said.names, "attention_bias": biased(said)}
    return {**own, "num_nextn_predict_layers": said.behind, **turns(said, partial=True)}


def hunyuan_moe(said: GgufHeader) -> Fields:
    said.only("expert_shared_feed_forward_length", said.number("feed_forward_length"))  # both are of one width
    own = experts(said, "hunyuan_v1_moe", "num_experts")
    own["moe_topk"] = own.pop("num_experts_per_tok")
    return {**own, "attention_bias": biased(said), **turns(said)}


def olmoe(said: GgufHeader) -> Fields:
    own = {**experts(said, "olmoe", "num_experts"), "norm_topk_prob": False, "attention_bias": biased(said)}
    return {**own, **turns(said)}
