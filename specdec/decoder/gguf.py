"""GGUF: a file's header -> the settings of its family, by transformers' names, one function for each architecture.

The function of the family then makes a spec of them, as of a folder's config (:mod:`specdec.decoder.families`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.decoder.gguf_header import GgufHeader
from specdec.decoder.gguf_mixtures import (
    glm4moe,
    gpt_oss,
    granite,
    granitehybrid,
    granitemoe,
    hunyuan_moe,
    olmoe,
    qwen2moe,
    qwen3moe,
)
from specdec.decoder.gguf_said import (
    biased,
    centred,
    dense,
    experts,
    kinds_of_layers,
    no_sections,
    no_windows,
    read_rope,
    rope_base,
    sizes,
    turns,
    windowed,
)
from specdec.errors import CheckpointError

__all__ = ["ARCHITECTURES", "fields_of"]

Fields = dict[str, Any]

_EMBEDDINGS = ("bert", "embed", "t5encoder", "clip")
_DRAFTS = ("eagle", "dflash", "medusa", "assistant")
_GELU = "gelu_pytorch_tanh"


def fields_of(said: GgufHeader) -> Fields:
    """What a header says, as the settings that the function of its family takes; ``model_type`` is the family.

    Raises:
        CheckpointError: a setting is missing, or it says what is not read; or the architecture is not.
    """
    if (architecture := ARCHITECTURES.get(said.architecture)) is None:
        raise _unlike(said)
    own = architecture(said)  # which may know better what is wrong with the sizes
    fields = {**sizes(said), **own}
    said.check_rest()
    return fields


def _unlike(said: GgufHeader) -> CheckpointError:
    """The error for an architecture that is not read."""
    if any(part in said.architecture for part in _EMBEDDINGS):
        why = "makes embeddings and no text; give a language model"
    elif any(part in said.architecture for part in _DRAFTS):
        why = "is a draft head and no model: give the model, and the head as the folder that it was published in"
    else:
        why = f"is not read from GGUF here, {', '.join(ARCHITECTURES)} are; load the model's folder of safetensors"
    return CheckpointError(f"the architecture {said.architecture!r} of {said.where} {why}")


def _llama(said: GgufHeader) -> Fields:
    if said.number("expert_count", 0):
        own = {"sliding_window": None, "attention_bias": biased(said)}
        return {**experts(said, "mixtral", "num_local_experts"), **own, **turns(said)}
    biases = {"attention_bias": biased(said), "mlp_bias": biased(said, "ffn_gate", "ffn_up", "ffn_down")}
    return {**dense(said, "llama"), **biases, **turns(said)}


def _qwen2(said: GgufHeader) -> Fields:
    own = {"lm_head_bias": "output.bias" in said.names}
    return {**dense(said, "qwen2"), **own, **no_windows(said), **turns(said)}


def _qwen3(said: GgufHeader) -> Fields:
    return {**dense(said, "qwen3"), "attention_bias": biased(said), **no_windows(said), **turns(said)}


def _gemma(said: GgufHeader) -> Fields:
    return {**dense(said, "gemma", hidden_act=_GELU), "attention_bias": biased(said), **turns(said)}


def _windowed_gemma(said: GgufHeader, model_type: str, largest: int, every: int) -> Fields:
    """Attention's scale, and layers with a window.

    Args:
        said: the file's settings.
        model_type: transformers' name of the family.
        largest: layers of the size whose attention is scaled by its width.
        every: each ``every``-th layer is global.
    """
    (heads, dim), width, layers = said.heads, said.number("embedding_length"), said.layers
    for name in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        said.only(name, dim)
    own = {"query_pre_attn_scalar": width // heads if layers == largest else dim, "attention_bias": biased(said)}
    return {**dense(said, model_type, hidden_activation=_GELU), **own, **kinds_of_layers(windowed(said, every))}


def _gemma2(said: GgufHeader) -> Fields:
    said.only("rope.freq_base_swa", rope_base(said))
    return {
        **_windowed_gemma(said, "gemma2", 46, 2),
        "sliding_window": said.number("attention.sliding_window", 4096),
        "attn_logit_softcapping": said.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said.number("final_logit_softcapping", 30.0),
        **turns(said),
    }


def _gemma3(said: GgufHeader) -> Fields:
    values = _windowed_gemma(said, "gemma3_text", 62, 6)
    if not (window := said.number("attention.sliding_window", 0)):  # then all layers are global
        values |= kinds_of_layers([False] * len(values["layer_types"]))
    own = {"sliding_window": window or 4096, **_two_ropes(said, float(said.number("rope.freq_base_swa", 10000.0)))}
    return {**values, **own, "final_logit_softcapping": said.number("final_logit_softcapping", 0) or None}


def _two_ropes(said: GgufHeader, base: float) -> Fields:
    """Positions of layers without a window as the file says, and plain ones of this base of those with one."""
    plain = {"rope_type": "default", "rope_theta": base}
    full = read_rope(said, said.heads[1])
    return {"rope_parameters": {"full_attention": full, "sliding_attention": plain}}


def _starcoder2(said: GgufHeader) -> Fields:
    own = centred(said, "starcoder2", "norm_epsilon", hidden_act=_GELU)
    return {**own, "use_bias": True, "sliding_window": None, **turns(said)}


def _phi3(said: GgufHeader) -> Fields:
    own = turns(said, partial=True)
    if (rope := own["rope_parameters"])["rope_type"] == "yarn":  # transformers' class takes it for LongRoPE
        raise said.refused("scales its rotary frequencies by YaRN, which is not read of phi3")
    trained = rope.get("original_max_position_embeddings", said.number("context_length"))
    own |= {"sliding_window": None, "attention_bias": biased(said)}
    return {**dense(said, "phi3"), "original_max_position_embeddings": trained, **own}


def _mistral3(said: GgufHeader) -> Fields:
    """Its queries grow with their positions where the file says by how much; otherwise it is a Llama."""
    growth = said.number("attention.temperature_scale", 0)
    said.only("expert_count", 0)
    if not growth:
        return _llama(said)
    own = turns(said)
    rope = own["rope_parameters"]
    if rope["rope_type"] == "longrope":  # in which these lengths mean something else
        raise said.refused("scales queries, and single frequencies or cosines and sines, which is not read together")
    trained = said.number("rope.scaling.original_context_length", 0) or said.number("context_length")
    rope |= {"llama_4_scaling_beta": growth, "original_max_position_embeddings": trained}
    return {**dense(said, "ministral3"), "attention_bias": biased(said), **own}


def _smollm3(said: GgufHeader) -> Fields:
    turning = [int((layer + 1) % 4 != 0) for layer in range(said.layers)]
    own = {"no_rope_layers": turning, "attention_bias": biased(said)}
    return {**dense(said, "smollm3"), **own, **no_windows(said), **turns(said)}


def _glm4(said: GgufHeader) -> Fields:
    no_sections(said)
    own = {"attention_bias": biased(said), "num_nextn_predict_layers": said.behind}
    return {**dense(said, "glm4"), **own, **turns(said, partial=True)}


def _olmo2(said: GgufHeader) -> Fields:
    own = {"attention_bias": biased(said)}
    if not (window := said.number("attention.sliding_window", 0)):
        return {**dense(said, "olmo2"), **own, **turns(said)}
    said.only("rope.freq_base_swa", rope_base(said))
    own |= {"sliding_window": window, **_two_ropes(said, rope_base(said))}
    return {**dense(said, "olmo3"), **own, **kinds_of_layers(windowed(said, 4))}


def _command_r(said: GgufHeader) -> Fields:
    own = {"logit_scale": said.number("logit_scale", 0) or 1.0}
    own |= {"use_qk_norm": "blk.0.attn_q_norm.weight" in said.names, "attention_bias": biased(said)}
    return {**centred(said, "cohere", "layer_norm_eps", hidden_act="silu"), **own, **turns(said)}


def _cohere2(said: GgufHeader) -> Fields:
    said.only("rope.freq_base_swa", rope_base(said))
    own = {"logit_scale": said.number("logit_scale") or 1.0, "sliding_window": said.number("attention.sliding_window")}
    own |= {"attention_bias": biased(said), **kinds_of_layers(windowed(said, 4))}
    return {**centred(said, "cohere2", "layer_norm_eps", hidden_act="silu"), **own, **turns(said)}


def _seed_oss(said: GgufHeader) -> Fields:
    own = {"attention_bias": biased(said), "attention_out_bias": False}
    return {**dense(said, "seed_oss"), **own, **turns(said)}


def _exaone4(said: GgufHeader) -> Fields:
    layers, window = said.layers, said.number("attention.sliding_window", 4096)
    said.only("rope.freq_base_swa", rope_base(said))
    local, large = windowed(said, 4), layers == 64  # the one size that has windows, whatever a file says
    own = {"sliding_window": window if large else None, "attention_bias": biased(said)}
    own |= {"num_nextn_predict_layers": said.behind, **kinds_of_layers(local if large else [False] * layers)}
    return {**dense(said, "exaone4"), **own, **turns(said)}


def _ernie(said: GgufHeader) -> Fields:
    return {**dense(said, "ernie4_5"), "use_bias": biased(said), **turns(said)}


def _hunyuan(said: GgufHeader) -> Fields:
    no_sections(said)
    dim, own = said.heads[1], turns(said)
    if alpha := said.number("rope.scaling.alpha", 0):
        own["rope_parameters"]["rope_theta"] *= alpha ** (dim / (dim - 2))
    return {**dense(said, "hunyuan_v1_dense"), "attention_bias": biased(said), **own}


ARCHITECTURES: dict[str, Callable[[GgufHeader], Fields]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": qwen3moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "starcoder2": _starcoder2,
    "phi3": _phi3,
    "gpt-oss": gpt_oss,
    "granite": granite,
    "granitehybrid": granitehybrid,
    "granitemoe": granitemoe,
    "smollm3": _smollm3,
    "mistral3": _mistral3,
    "glm4": _glm4,
    "glm4moe": glm4moe,
    "olmo2": _olmo2,
    "olmoe": olmoe,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "ernie4_5": _ernie,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": hunyuan_moe,
}
"""llama.cpp's name of an architecture -> what its header says, but for sizes."""
