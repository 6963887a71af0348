"""Families: a model's settings -> what its decoder computes, one small function each, and what its tensors are called.

The settings are a plain mapping by transformers' names (:mod:`specdec.decoder.settings`), so that a function serves a
folder's config as well as a file's header. A value that is none of those that a function knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specdec.decoder.family_names import (
    AFTER,
    AROUND,
    EXAONE_MOE,
    GLM,
    GLM4,
    GPT_OSS,
    GRANITE_MOE,
    HUNYUAN,
    LFM2,
    MIXTRAL,
    NEIGHBOURS,
    PHI3,
    QWEN2_MOE,
    STARCODER2,
)
from specdec.decoder.family_parts import (
    KINDS,
    added_biases,
    alike,
    biased_layer_norm,
    biased_mlp,
    biases_of,
    by_mlp_type,
    head_dim_of,
    layer_norm,
    of_kinds,
    read_attention,
    read_experts,
    read_gated,
    read_norm,
    some_with_experts,
    window_of,
)
from specdec.decoder.names import DECODER, Names
from specdec.decoder.rope_settings import read_rope, read_ropes, rope_context
from specdec.decoder.settings import Settings
from specdec.decoder.spec import (
    Attention,
    DecoderSpec,
    Embedding,
    Head,
    Layer,
    Norm,
    Rope,
    UnknownDecoder,
)
from specdec.decoder.torch_families import (
    cohere,
    cohere2,
    exaone4,
    exaone_moe,
    glm,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granite_hybrid,
    granite_moe,
    granite_scales,
    hunyuan,
    hunyuan_moe,
    lfm2,
    logit_scale,
    ministral3,
    olmo2,
    olmo3,
    phi3,
    qwen2_moe,
    smollm3,
    starcoder2,
)
from specdec.errors import CheckpointError, shown

__all__ = ["FAMILIES", "Family", "is_described", "spec_of"]

_PLAIN = Names(DECODER)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        architecture: transformers' class of them.
        layers: a function of settings that gives the layers.
        names: of their tensors.
        norm: a function of settings that gives the last norm.
        scales: one that gives what embeddings are multiplied by, and logits.
    """

    architecture: str
    layers: Callable[[Settings], list[Layer]]
    names: Names = _PLAIN
    norm: Callable[[Settings], Norm] = read_norm
    scales: Callable[[Settings], tuple[float, float]] = lambda settings: (1.0, 1.0)


def spec_of(model_type: str, settings: Settings) -> DecoderSpec:
    """The decoder that settings of this ``model_type`` describe.

    Raises:
        UnknownDecoder: no family of this name, or a setting that its description has no place for.
        CheckpointError: a setting is missing, or cannot be.
    """
    if (family := FAMILIES.get(model_type)) is None:
        raise UnknownDecoder(f"its model_type {shown(model_type)} is none of {', '.join(sorted(FAMILIES))}")
    settings.refuse("is_encoder_decoder")
    if settings.get("is_causal", True) is not True:  # transformers' masks heed it, whatever the class declares
        raise UnknownDecoder(f"{settings.where} says is_causal {shown(settings.get('is_causal'))}")
    hidden = settings.count("hidden_size")
    cap = settings.get("final_logit_softcapping") if settings.declares("final_logit_softcapping") else None
    by, logits_by = family.scales(settings)
    bias = settings.declares("lm_head_bias") and bool(settings.get("lm_head_bias"))
    spec = DecoderSpec(
        architecture=family.architecture,
        vocab=settings.count("vocab_size"),
        hidden=hidden,
        context=rope_context(settings),
        layers=tuple(family.layers(settings)),
        embedding=Embedding(by),
        head=Head(family.norm(settings), bool(settings.get("tie_word_embeddings")), float(cap or 0.0), logits_by, bias),
    )
    settings.check_read()
    return spec


def is_described(config: Any) -> bool:
    """Whether a text config of transformers describes a decoder; one with a value that cannot be would."""
    if getattr(config, "model_type", "") not in FAMILIES:
        return False
    try:
        return bool(spec_of(config.model_type, Settings.of(config)))
    except UnknownDecoder:
        return False
    except CheckpointError:
        return True


def _llama(settings: Settings) -> list[Layer]:
    return alike(settings, read_attention(settings, bias=biases_of(settings)), biased_mlp(settings))


def _seed_oss(settings: Settings) -> list[Layer]:
    settings.said("residual_dropout")
    biases = bool(settings.get("attention_bias")), bool(settings.get("attention_out_bias"))
    return alike(settings, read_attention(settings, bias=biases), biased_mlp(settings))


def _ernie(settings: Settings) -> list[Layer]:
    bias = bool(settings.get("use_bias"))
    return alike(settings, read_attention(settings, bias=(bias, bias)), biased_mlp(settings, "use_bias"))


def _mistral(settings: Settings) -> list[Layer]:
    return alike(settings, read_attention(settings, window=window_of(settings)), read_gated(settings))


def _qwen2(settings: Settings) -> list[Layer]:
    return _windowed(settings, read_attention(settings, bias=(True, False)))


def _qwen3(settings: Settings) -> list[Layer]:
    return _windowed(settings, read_attention(settings, bias=biases_of(settings), qk_norm=read_norm(settings)))


def _gemma(settings: Settings) -> list[Layer]:
    settings.refuse("use_bidirectional_attention")
    return alike(settings, read_attention(settings, bias=biases_of(settings)), read_gated(settings), offset=True)


def _gemma2(settings: Settings) -> list[Layer]:
    settings.said("sliding_window_size")  # sliding_window says the same
    cap = float(settings.get("attn_logit_softcapping") or 0.0)
    own = _gemma_layer(settings, read_rope(settings, head_dim_of(settings)))
    own = replace(own, mixer=replace(own.attention, cap=cap))
    return of_kinds(settings, own, replace(own, mixer=replace(own.attention, window=window_of(settings))))


def _gemma3(settings: Settings) -> list[Layer]:
    settings.said("attn_logit_softcapping", "sliding_window_pattern")  # not made use of; in layer_types
    ropes = read_ropes(settings, head_dim_of(settings), KINDS)
    full, sliding = (_gemma_layer(settings, ropes[kind], qk_norm=read_norm(settings, offset=True)) for kind in KINDS)
    return of_kinds(settings, full, replace(sliding, mixer=replace(sliding.attention, window=window_of(settings))))


def _mixtral(settings: Settings) -> list[Layer]:
    attention = read_attention(settings, bias=added_biases(settings), window=window_of(settings))
    return alike(settings, attention, read_experts(settings, "num_local_experts", "intermediate_size", norm=True))


def _olmoe(settings: Settings) -> list[Layer]:
    settings.refuse("clip_qkv")
    attention = read_attention(settings, bias=biases_of(settings), qk_norm=read_norm(settings), norms_all=True)
    return alike(settings, attention, read_experts(settings, "num_experts", "intermediate_size"))


def _qwen3_moe(settings: Settings) -> list[Layer]:
    window = window_of(settings) if settings.get("use_sliding_window") else None
    if window is None:
        settings.said("sliding_window", "max_window_layers")
    attention = read_attention(settings, bias=biases_of(settings), qk_norm=read_norm(settings), window=window)
    return some_with_experts(settings, alike(settings, attention, read_gated(settings)))


def _windowed(settings: Settings, attention: Attention) -> list[Layer]:
    """Layers of which some have a window."""
    settings.said("use_sliding_window", "max_window_layers")  # layer_types says what follows of them
    norm = read_norm(settings)
    own = Layer(attention, read_gated(settings), (norm, norm))
    return of_kinds(settings, own, replace(own, mixer=replace(attention, window=window_of(settings))))


def _mellum(settings: Settings) -> list[Layer]:
    settings.said("mtp_layer_types", "mtp_mlp_layer_types")  # of layers behind the model's own
    ropes, norm = read_ropes(settings, head_dim_of(settings), KINDS, partial=True), read_norm(settings)
    own = read_attention(settings, bias=biases_of(settings), qk_norm=norm, rope=ropes["full_attention"])
    sliding = replace(own, rope=ropes["sliding_attention"], window=window_of(settings))
    experts = read_experts(settings, "num_experts", "moe_intermediate_size")
    return by_mlp_type(settings, experts, Layer(own, experts, (norm, norm)), Layer(sliding, experts, (norm, norm)))


def _gemma_layer(settings: Settings, rope: Rope, **more: Any) -> Layer:
    """A layer of Gemma 2 and 3, without its window."""
    settings.refuse("use_bidirectional_attention")
    scale = settings.number("query_pre_attn_scalar") ** -0.5
    attention = read_attention(settings, bias=biases_of(settings), scale=scale, rope=rope, **more)
    norm = read_norm(settings, offset=True)
    return Layer(attention, read_gated(settings, "hidden_activation"), (norm, norm), (norm, norm))


def _by_width(settings: Settings) -> tuple[float, float]:
    return settings.count("hidden_size") ** 0.5, 1.0


_GEMMA = partial(read_norm, offset=True), _by_width
FAMILIES: Mapping[str, Family] = {
    "internlm3": Family("LlamaForCausalLM", _llama),
    "iquestcoder": Family("LlamaForCausalLM", _llama),
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "cohere": Family("CohereForCausalLM", cohere, NEIGHBOURS, layer_norm, logit_scale),
    "cohere2": Family("Cohere2ForCausalLM", cohere2, NEIGHBOURS, layer_norm, logit_scale),
    "ernie4_5": Family("Ernie4_5ForCausalLM", _ernie, NEIGHBOURS),
    "exaone4": Family("Exaone4ForCausalLM", exaone4, AFTER),
    "gemma": Family("GemmaForCausalLM", _gemma, _PLAIN, *_GEMMA),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, AROUND, *_GEMMA),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, AROUND, *_GEMMA),
    "exaone_moe": Family("ExaoneMoeForCausalLM", exaone_moe, EXAONE_MOE),
    "glm": Family("GlmForCausalLM", glm, GLM),
    "glm4": Family("Glm4ForCausalLM", glm4, GLM4),
    "glm4_moe": Family("Glm4MoeForCausalLM", glm4_moe),
    "gpt_oss": Family("GptOssForCausalLM", gpt_oss, GPT_OSS),
    "granite": Family("GraniteForCausalLM", granite, scales=granite_scales),
    "granitemoe": Family("GraniteMoeForCausalLM", granite_moe, GRANITE_MOE, scales=granite_scales),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", granite_hybrid, GRANITE_MOE, scales=granite_scales),
    "granitemoeshared": Family(
        "GraniteMoeSharedForCausalLM", partial(granite_moe, shared=True), GRANITE_MOE, scales=granite_scales
    ),
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", hunyuan, HUNYUAN),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", hunyuan_moe, HUNYUAN),
    "lfm2": Family("Lfm2ForCausalLM", lfm2, LFM2),
    "ministral3": Family("Ministral3ForCausalLM", ministral3),
    "mellum": Family("MellumForCausalLM", _mellum),
    "mixtral": Family("MixtralForCausalLM", _mixtral, MIXTRAL),
    "olmo2": Family("Olmo2ForCausalLM", olmo2, AFTER),
    "olmo3": Family("Olmo3ForCausalLM", olmo3, AFTER),
    "olmoe": Family("OlmoeForCausalLM", _olmoe),
    "phi3": Family("Phi3ForCausalLM", phi3, PHI3),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", qwen2_moe, QWEN2_MOE),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "seed_oss": Family("SeedOssForCausalLM", _seed_oss),
    "smollm3": Family("SmolLM3ForCausalLM", smollm3),
    "starcoder2": Family("Starcoder2ForCausalLM", starcoder2, STARCODER2, biased_layer_norm),
}
"""transformers' ``model_type`` -> the family."""
