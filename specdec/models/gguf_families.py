"""Architectures of GGUF files: what their settings are in transformers' words, one function each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdec.models.gguf_rope import read_rope, rope_base
from specdec.models.gguf_settings import GgufSettings

__all__ = ["FAMILIES"]


def _turns(said: GgufSettings, *, partial: bool = False) -> dict[str, Any]:
    """Rotary positions that all layers share."""
    return {"rope_parameters": read_rope(said, said.heads[1], partial=partial)}


def _rms_norm(said: GgufSettings) -> dict[str, Any]:
    return {"rms_norm_eps": float(said.number("attention.layer_norm_rms_epsilon"))}


def _layer_norm(said: GgufSettings) -> float:
    return float(said.number("attention.layer_norm_epsilon"))


def _no_experts(said: GgufSettings) -> None:
    said.only("expert_count", 0)
    said.only("expert_used_count", 0)


def _dense(said: GgufSettings, model_type: str) -> dict[str, Any]:
    """A model without experts, with RMS norms."""
    _no_experts(said)
    return {"model_type": model_type, **_rms_norm(said)}


def _biases(said: GgufSettings) -> dict[str, Any]:
    """Whether products of attention have biases; those that a file lacks are 0."""
    kinds = (("q", "k", "v", "output"), ("gate", "up", "down"))
    attention, mlp = (
        any(f"blk.0.{place}_{part}.bias" in said.names for part in parts)
        for place, parts in zip(("attn", "ffn"), kinds, strict=True)
    )
    return {"attention_bias": attention, "mlp_bias": mlp}


def _experts(said: GgufSettings, count: str) -> dict[str, Any]:
    there, chosen = said.number("expert_count"), said.number("expert_used_count")
    if not 1 <= chosen <= there:
        raise said.refused(f"has {there} experts, of which a token goes to {chosen}", "get it again")
    return {count: there, "num_experts_per_tok": chosen}


def _narrow(said: GgufSettings) -> int:
    """Width of an expert."""
    wide, chosen = said.number("feed_forward_length"), said.number("expert_used_count")
    return int(said.number("expert_feed_forward_length", wide // max(chosen, 1)))


def _no_sections(said: GgufSettings) -> None:
    """Raises CheckpointError where positions are of several dimensions, as of images."""
    sections = said.get("rope.dimension_sections")
    if any(sections if isinstance(sections, list) else [sections]):
        raise said.refused(f"says {said.family}.rope.dimension_sections {sections}, and only text is read from GGUF")


def _local(said: GgufSettings, every: int) -> list[bool]:
    """Which layers have a window: all but each ``every``-th one, unless the file says which."""
    layers, pattern = said.number("block_count"), said.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [bool(one) for one in pattern[:layers]]
    return [not pattern or layer % pattern < pattern - 1 for layer in range(layers)]


def _kinds(local: Sequence[bool]) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention" if here else "full_attention" for here in local]}


def _llama(said: GgufSettings) -> dict[str, Any]:
    if said.number("expert_count", 0):
        experts = _experts(said, "num_local_experts")
        return {"model_type": "mixtral", "sliding_window": None, **_rms_norm(said), **experts, **_turns(said)}
    return {**_dense(said, "llama"), **_biases(said), **_turns(said)}


def _qwen2(said: GgufSettings) -> dict[str, Any]:
    return {**_dense(said, "qwen2"), "use_sliding_window": False, **_turns(said)}


def _qwen3(said: GgufSettings) -> dict[str, Any]:
    biases = {"attention_bias": _biases(said)["attention_bias"]}
    return {**_dense(said, "qwen3"), "use_sliding_window": False, **biases, **_turns(said)}


def _qwen2moe(said: GgufSettings) -> dict[str, Any]:
    return {
        "model_type": "qwen2_moe",
        **_experts(said, "num_experts"),
        "moe_intermediate_size": _narrow(said),
        "shared_expert_intermediate_size": said.number(
            "expert_shared_feed_forward_length", said.number("feed_forward_length")
        ),
        "norm_topk_prob": False,
        "use_sliding_window": False,
        **_rms_norm(said),
        **_turns(said),
    }


def _qwen3moe(said: GgufSettings) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        **_experts(said, "num_experts"),
        "moe_intermediate_size": _narrow(said),
        "norm_topk_prob": True,
        "use_sliding_window": False,
        **_rms_norm(said),
        **_turns(said),
    }


def _gemma(said: GgufSettings) -> dict[str, Any]:
    return {**_dense(said, "gemma"), "hidden_act": "gelu_pytorch_tanh", **_turns(said)}


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
    return {**_dense(said, model_type), "query_pre_attn_scalar": scale, **_kinds(_local(said, every))}


def _gemma2(said: GgufSettings) -> dict[str, Any]:
    said.only("rope.freq_base_swa", rope_base(said))
    return {
        **_windowed_gemma(said, "gemma2", 46, 2),
        "sliding_window": said.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": said.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.number("final_logit_softcapping", 30.0),
        **_turns(said),
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
    _no_experts(said)
    own = {"norm_epsilon": _layer_norm(said), "sliding_window": None}
    return {"model_type": "starcoder2", **own, **_turns(said)}


def _phi3(said: GgufSettings) -> dict[str, Any]:
    turns = _turns(said, partial=True)
    if turns["rope_parameters"]["rope_type"] != "default":  # transformers' class has a kind of its own alone
        raise said.refused("scales its rotary frequencies, which is not read of phi3: the model would be another one")
    return {**_dense(said, "phi3"), "sliding_window": None, **turns}


def _granite(said: GgufSettings) -> dict[str, Any]:
    dim = said.heads[1]
    return {
        **_dense(said, "granite"),
        **_biases(said),
        "logits_scaling": said.number("logit_scale"),
        "residual_multiplier": said.number("residual_scale", 0) or 1.0,
        "embedding_multiplier": said.number("embedding_scale", 0) or 1.0,
        "attention_multiplier": said.number("attention.scale", 0) or dim**-0.5,
        **_turns(said),
    }


def _smollm3(said: GgufSettings) -> dict[str, Any]:
    own = {"no_rope_layer_interval": 4, "use_sliding_window": False}
    return {**_dense(said, "smollm3"), **own, **_turns(said)}


def _glm4(said: GgufSettings) -> dict[str, Any]:
    _no_sections(said)
    biases = {"attention_bias": _biases(said)["attention_bias"]}
    return {**_dense(said, "glm4"), **biases, **_turns(said, partial=True)}


def _olmo2(said: GgufSettings) -> dict[str, Any]:
    if not (window := said.number("attention.sliding_window", 0)):
        return {**_dense(said, "olmo2"), **_turns(said)}
    said.only("rope.freq_base_swa", rope_base(said))
    kinds = {
        "full_attention": read_rope(said, said.heads[1]),
        "sliding_attention": {"rope_type": "default", "rope_theta": rope_base(said)},
    }
    own = {"sliding_window": window, "rope_parameters": kinds}
    return {**_dense(said, "olmo3"), **own, **_kinds(_local(said, 4))}


def _command_r(said: GgufSettings) -> dict[str, Any]:
    _no_experts(said)
    return {
        "model_type": "cohere",
        "layer_norm_eps": _layer_norm(said),
        "logit_scale": said.number("logit_scale", 0) or 1.0,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in said.names,
        **_turns(said),
    }


def _cohere2(said: GgufSettings) -> dict[str, Any]:
    _no_experts(said)
    said.only("rope.freq_base_swa", rope_base(said))
    return {
        "model_type": "cohere2",
        "layer_norm_eps": _layer_norm(said),
        "logit_scale": said.number("logit_scale") or 1.0,
        "sliding_window": said.number("attention.sliding_window"),
        **_kinds(_local(said, 4)),
        **_turns(said),
    }


def _seed_oss(said: GgufSettings) -> dict[str, Any]:
    own = {"attention_bias": _biases(said)["attention_bias"], "attention_out_bias": False}
    return {**_dense(said, "seed_oss"), **own, **_turns(said)}


def _exaone4(said: GgufSettings) -> dict[str, Any]:
    layers, window = said.number("block_count"), said.number("attention.sliding_window", 4096)
    said.only("rope.freq_base_swa", rope_base(said))
    local, large = _local(said, 4), layers == 64  # the one size that has windows, whatever a file says
    kinds = _kinds(local if large else [False] * layers)
    return {**_dense(said, "exaone4"), "sliding_window": window if large else None, **kinds, **_turns(said)}


def _ernie(said: GgufSettings) -> dict[str, Any]:
    return {**_dense(said, "ernie4_5"), **_turns(said)}


def _hunyuan(said: GgufSettings) -> dict[str, Any]:
    _no_sections(said)
    dim, turns = said.heads[1], _turns(said)
    if alpha := said.number("rope.scaling.alpha", 0):
        turns["rope_parameters"]["rope_theta"] *= alpha ** (dim / (dim - 2))
    return {**_dense(said, "hunyuan_v1_dense"), **turns}


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
    "granite": _granite,
    "smollm3": _smollm3,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "ernie4_5": _ernie,
    "hunyuan-dense": _hunyuan,
}
"""Architecture -> what its settings say beyond those of all."""
