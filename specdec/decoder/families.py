"""Families: a model's settings -> what its decoder computes, one small function each, and what its tensors are called.

The settings are a plain mapping by transformers' names (:mod:`specdec.decoder.settings`), so that a function serves a
folder's config as well as a file's header. A value that is none of those that a function knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specdec.decoder.names import DECODER, Names
from specdec.decoder.rope_settings import read_rope, read_ropes, rope_context
from specdec.decoder.settings import Settings
from specdec.decoder.spec import (
    Activation,
    Attention,
    DecoderSpec,
    Embedding,
    Experts,
    Gated,
    Head,
    Layer,
    Mlp,
    Norm,
    Rope,
    ShortConv,
    Sigmoid,
    UnknownDecoder,
)
from specdec.errors import CheckpointError, shown

__all__ = ["FAMILIES", "Family", "spec_of"]

_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_KINDS = ("full_attention", "sliding_attention")
_PLAIN = Names(DECODER)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        architecture: transformers' class of them.
        layers: a function of settings that gives the layers.
        names: of their tensors.
        scaled: whether embeddings are multiplied by the root of their width, and norms by one more than their weight.
    """

    architecture: str
    layers: Callable[[Settings], list[Layer]]
    names: Names = _PLAIN
    scaled: bool = False


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
    spec = DecoderSpec(
        architecture=family.architecture,
        vocab=settings.count("vocab_size"),
        hidden=hidden,
        context=rope_context(settings),
        layers=tuple(family.layers(settings)),
        embedding=Embedding(hidden**0.5 if family.scaled else 1.0),
        head=Head(_norm(settings, offset=family.scaled), bool(settings.get("tie_word_embeddings")), float(cap or 0.0)),
    )
    settings.check_read()
    return spec


def _llama(settings: Settings) -> list[Layer]:
    mlp = replace(_gated(settings), bias=bool(settings.get("mlp_bias")))
    return _alike(settings, _attention(settings, bias=_biases(settings)), mlp)


def _mistral(settings: Settings) -> list[Layer]:
    return _alike(settings, _attention(settings, window=_window(settings)), _gated(settings))


def _qwen2(settings: Settings) -> list[Layer]:
    return _windowed(settings, _attention(settings, bias=(True, False)))


def _qwen3(settings: Settings) -> list[Layer]:
    return _windowed(settings, _attention(settings, bias=_biases(settings), qk_norm=_norm(settings)))


def _gemma(settings: Settings) -> list[Layer]:
    settings.refuse("use_bidirectional_attention")
    return _alike(settings, _attention(settings, bias=_biases(settings)), _gated(settings), offset=True)


def _gemma2(settings: Settings) -> list[Layer]:
    settings.said("sliding_window_size")  # sliding_window says the same
    cap = float(settings.get("attn_logit_softcapping") or 0.0)
    own = _gemma_layer(settings, read_rope(settings, _head_dim(settings)))
    own = replace(own, mixer=replace(own.attention, cap=cap))
    return _of_kinds(settings, own, replace(own, mixer=replace(own.attention, window=_window(settings))))


def _gemma3(settings: Settings) -> list[Layer]:
    settings.said("attn_logit_softcapping", "sliding_window_pattern")  # not made use of; in layer_types
    ropes = read_ropes(settings, _head_dim(settings), _KINDS)
    full, sliding = (_gemma_layer(settings, ropes[kind], qk_norm=_norm(settings, offset=True)) for kind in _KINDS)
    return _of_kinds(settings, full, replace(sliding, mixer=replace(sliding.attention, window=_window(settings))))


def _lfm2(settings: Settings) -> list[Layer]:
    settings.said("full_attn_idxs")  # in layer_types
    width, norm = settings.count("intermediate_size"), _norm(settings)
    multiple, factor = settings.count("block_multiple_of"), settings.get("block_ffn_dim_multiplier")
    if settings.get("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        width = width if factor is None else -(-int(factor * width) // multiple) * multiple
    own = Layer(_attention(settings, qk_norm=norm), Gated("silu", width), (norm, norm))
    mixer = ShortConv(settings.count("conv_L_cache"), bool(settings.get("conv_bias")))
    return _by_type(settings, {"full_attention": own, "conv": replace(own, mixer=mixer)})


def _mixtral(settings: Settings) -> list[Layer]:
    attention = _attention(settings, window=_window(settings))
    return _alike(settings, attention, _experts(settings, "num_local_experts", "intermediate_size", norm=True))


def _olmoe(settings: Settings) -> list[Layer]:
    settings.refuse("clip_qkv")
    attention = _attention(settings, bias=_biases(settings), qk_norm=_norm(settings), norms_all=True)
    return _alike(settings, attention, _experts(settings, "num_experts", "intermediate_size"))


def _qwen3_moe(settings: Settings) -> list[Layer]:
    window = _window(settings) if settings.get("use_sliding_window") else None
    if window is None:
        settings.said("sliding_window", "max_window_layers")
    norm = _norm(settings)
    attention = _attention(settings, bias=_biases(settings), qk_norm=norm, window=window)
    dense = Layer(attention, _gated(settings), (norm, norm))
    if settings.get("num_experts") == 0:
        settings.said("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        settings.said("decoder_sparse_step", "mlp_only_layers")
        return [dense] * settings.count("num_hidden_layers")
    mixed = replace(dense, mlp=_experts(settings, "num_experts", "moe_intermediate_size"))
    every, alone = settings.count("decoder_sparse_step"), settings.get("mlp_only_layers") or ()
    numbers = range(settings.count("num_hidden_layers"))
    return [dense if number in alone or (number + 1) % every else mixed for number in numbers]


def _mellum(settings: Settings) -> list[Layer]:
    settings.said("num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")  # of layers behind the model's own
    ropes, norm = read_ropes(settings, _head_dim(settings), _KINDS, partial=True), _norm(settings)
    own = _attention(settings, bias=_biases(settings), qk_norm=norm, rope=ropes["full_attention"])
    sliding = replace(own, rope=ropes["sliding_attention"], window=_window(settings))
    experts = _experts(settings, "num_experts", "moe_intermediate_size")
    mlps: dict[str, Mlp] = {"sparse": experts, "dense": _gated(settings)}
    each = {
        kind: _of_kinds(settings, Layer(own, mlp, (norm, norm)), Layer(sliding, mlp, (norm, norm)))
        for kind, mlp in mlps.items()
    }
    kinds = settings.get("mlp_layer_types") or ()
    if len(kinds) != len(each["sparse"]) or not {*kinds} <= mlps.keys():
        raise CheckpointError(f"{settings.where} says mlp_layer_types {shown(kinds)}, one of sparse and dense a layer")
    return [each[kind][number] for number, kind in enumerate(kinds)]


def _glm4_moe(settings: Settings) -> list[Layer]:
    settings.said("num_mtp_layers")  # behind the model's own
    norm, rope = _norm(settings), read_rope(settings, _head_dim(settings), partial=True)
    normed = norm if settings.get("use_qk_norm") else None
    attention = _attention(settings, partial=True, bias=(_biases(settings)[0], False), qk_norm=normed, rope=rope)
    router = Sigmoid(settings.count("n_group"), settings.count("topk_group"), settings.number("routed_scaling_factor"))
    experts = _experts(settings, "n_routed_experts", "moe_intermediate_size")
    if experts.count % router.groups or (router.best < router.groups and experts.count < 2 * router.groups):
        raise CheckpointError(f"{settings.where} says n_group {router.groups} of its {experts.count} experts; mend it")
    experts = replace(experts, router=router, shared=experts.width * int(settings.get("n_shared_experts") or 0))
    dense, mixed = (Layer(attention, mlp, (norm, norm)) for mlp in (_gated(settings), experts))
    first = int(settings.get("first_k_dense_replace") or 0)
    return [dense if number < first else mixed for number in range(settings.count("num_hidden_layers"))]


def _alike(settings: Settings, attention: Attention, mlp: Mlp, *, offset: bool = False) -> list[Layer]:
    """Layers that are all the same."""
    norm = _norm(settings, offset=offset)
    return [Layer(attention, mlp, (norm, norm))] * settings.count("num_hidden_layers")


def _windowed(settings: Settings, attention: Attention) -> list[Layer]:
    """Layers of which some have a window."""
    settings.said("use_sliding_window", "max_window_layers")  # layer_types says what follows of them
    norm = _norm(settings)
    own = Layer(attention, _gated(settings), (norm, norm))
    return _of_kinds(settings, own, replace(own, mixer=replace(attention, window=_window(settings))))


def _of_kinds(settings: Settings, full: Layer, sliding: Layer) -> list[Layer]:
    """Layers of which some have a window."""
    layers = _by_type(settings, dict(zip(_KINDS, (full, sliding), strict=True)))
    if sliding.attention.window is None and "sliding_attention" in settings.get("layer_types"):
        raise CheckpointError(f"{settings.where} has sliding_attention layers and no sliding_window; mend it")
    return layers


def _by_type(settings: Settings, known: Mapping[str, Layer]) -> list[Layer]:
    """The layer of each kind in ``layer_types``."""
    kinds, layers = settings.get("layer_types"), settings.count("num_hidden_layers")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise CheckpointError(f"{settings.where} has {layers} layers and says layer_types {shown(kinds)}; mend it")
    if strange := [kind for kind in kinds if kind not in known]:
        raise UnknownDecoder(f"{settings.where} has layers of the type {shown(strange[0])}")
    return [known[kind] for kind in kinds]


def _gemma_layer(settings: Settings, rope: Rope, **more: Any) -> Layer:
    """A layer of Gemma 2 and 3, without its window."""
    settings.refuse("use_bidirectional_attention")
    scale = settings.number("query_pre_attn_scalar") ** -0.5
    attention = _attention(settings, bias=_biases(settings), scale=scale, rope=rope, **more)
    norm = _norm(settings, offset=True)
    return Layer(attention, _gated(settings, "hidden_activation"), (norm, norm), (norm, norm))


def _attention(settings: Settings, *, partial: bool = False, **more: Any) -> Attention:
    """Attention by the settings that all families have; ``more``: what a family knows better, or in addition.

    ``partial``: it may turn a part of each head.
    """
    heads, head_dim = settings.count("num_attention_heads"), _head_dim(settings)
    kv_heads = heads if settings.get("num_key_value_heads") is None else settings.count("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"{settings.where} says num_attention_heads {heads}, which its num_key_value_heads {kv_heads} do not divide"
        )
    rope = more.pop("rope", None) or read_rope(settings, head_dim)
    if rope.dim != head_dim and not partial:
        raise UnknownDecoder(f"{settings.where} turns {rope.dim} of the {head_dim} values of a head")
    return Attention(heads, kv_heads, head_dim, more.pop("scale", head_dim**-0.5), rope, **more)


def _head_dim(settings: Settings) -> int:
    if settings.get("head_dim") is not None:
        return settings.count("head_dim")
    return settings.count("hidden_size") // settings.count("num_attention_heads")


def _biases(settings: Settings) -> tuple[bool, bool]:
    bias = bool(settings.get("attention_bias"))
    return bias, bias


def _window(settings: Settings) -> int | None:
    return None if settings.get("sliding_window") is None else settings.count("sliding_window")


def _norm(settings: Settings, *, offset: bool = False) -> Norm:
    key = "rms_norm_eps" if settings.declares("rms_norm_eps") else "norm_eps"
    return Norm(settings.number(key), 1.0 if offset else 0.0)


def _activation(settings: Settings, key: str) -> Activation:
    if (said := settings.get(key)) not in _ACTIVATIONS:
        raise UnknownDecoder(f"{settings.where} says {key} {shown(said)}, and known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[said]


def _gated(settings: Settings, activation: str = "hidden_act") -> Gated:
    return Gated(_activation(settings, activation), settings.count("intermediate_size"))


def _experts(settings: Settings, count: str, width: str, *, norm: bool | None = None) -> Experts:
    """``norm``: where the family has no setting for it."""
    number, chosen = settings.count(count), settings.count("num_experts_per_tok")
    if chosen > number:
        raise CheckpointError(f"{settings.where} says num_experts_per_tok {chosen}, and has {number} experts; mend it")
    norm = bool(settings.get("norm_topk_prob")) if norm is None else norm
    return Experts(_activation(settings, "hidden_act"), settings.count(width), number, chosen, norm)


_AROUND = Names(
    {
        **DECODER,
        "after.attention": ("layers.{layer}.post_attention_layernorm",),
        "before.mlp": ("layers.{layer}.pre_feedforward_layernorm",),
        "after.mlp": ("layers.{layer}.post_feedforward_layernorm",),
    }
)
_LFM2 = Names(
    {
        **DECODER,
        "norm": ("embedding_norm",),
        "before.attention": ("layers.{layer}.operator_norm",),
        "before.mlp": ("layers.{layer}.ffn_norm",),
        "attention.o": ("layers.{layer}.self_attn.out_proj",),
        **{f"attention.{one}_norm": (f"layers.{{layer}}.self_attn.{one}_layernorm",) for one in "qk"},
        **{
            f"mlp.{part}": (f"layers.{{layer}}.feed_forward.{name}",)
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
)
_MIXTRAL = Names(
    {
        **DECODER,
        "experts.router": ("layers.{layer}.mlp.gate", "layers.{layer}.block_sparse_moe.gate"),
        **{
            f"experts.{part}": (
                f"layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{name}",
                f"layers.{{layer}}.mlp.experts.{{expert}}.{name}",
            )
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
)
FAMILIES: Mapping[str, Family] = {
    "internlm3": Family("LlamaForCausalLM", _llama),
    "iquestcoder": Family("LlamaForCausalLM", _llama),
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "gemma": Family("GemmaForCausalLM", _gemma, scaled=True),
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, _AROUND, scaled=True),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, _AROUND, scaled=True),
    "glm4_moe": Family("Glm4MoeForCausalLM", _glm4_moe),
    "lfm2": Family("Lfm2ForCausalLM", _lfm2, _LFM2),
    "mellum": Family("MellumForCausalLM", _mellum),
    "mixtral": Family("MixtralForCausalLM", _mixtral, _MIXTRAL),
    "olmoe": Family("OlmoeForCausalLM", _olmoe),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
}
"""transformers' ``model_type`` -> the family."""
