"""What settings say of a decoder's parts, as most families say it: attention, norms, MLPs and experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec.decoder.rope_settings import read_rope
from specdec.decoder.settings import Settings
from specdec.decoder.spec import Activation, Attention, Experts, Gated, Layer, Mlp, Norm, UnknownDecoder
from specdec.errors import CheckpointError, shown

__all__ = [
    "KINDS",
    "added_biases",
    "alike",
    "biased_layer_norm",
    "biased_mlp",
    "biases_of",
    "by_mlp_type",
    "by_type",
    "head_dim_of",
    "layer_norm",
    "of_kinds",
    "read_activation",
    "read_attention",
    "read_experts",
    "read_gated",
    "read_norm",
    "some_with_experts",
    "window_of",
]

KINDS = ("full_attention", "sliding_attention")
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_attention(settings: Settings, *, partial: bool = False, **more: Any) -> Attention:
    """Attention by the settings that all families have.

    ``partial``: a part of each head may turn. ``more``: what a family knows better, or in addition.
    """
    heads, head_dim = settings.count("num_attention_heads"), head_dim_of(settings)
    kv_heads = heads if settings.get("num_key_value_heads") is None else settings.count("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"{settings.where} says num_attention_heads {heads}, which its num_key_value_heads {kv_heads} do not divide"
        )
    rope = more.pop("rope", None) or read_rope(settings, head_dim, partial=partial)
    if rope.dim != head_dim and not partial:
        raise UnknownDecoder(f"{settings.where} turns {rope.dim} of the {head_dim} values of a head")
    return Attention(heads, kv_heads, head_dim, more.pop("scale", head_dim**-0.5), rope, **more)


def head_dim_of(settings: Settings) -> int:
    if settings.get("head_dim") is not None:
        return settings.count("head_dim")
    return settings.count("hidden_size") // settings.count("num_attention_heads")


def biases_of(settings: Settings) -> tuple[bool, bool]:
    bias = bool(settings.get("attention_bias"))
    return bias, bias


def added_biases(settings: Settings) -> tuple[bool, bool]:
    """Of a family whose class has none, and whose GGUF files may."""
    return biases_of(settings) if settings.declares("attention_bias") else (False, False)


def window_of(settings: Settings) -> int | None:
    return None if settings.get("sliding_window") is None else settings.count("sliding_window")


def read_norm(settings: Settings, *, offset: bool = False) -> Norm:
    key = "rms_norm_eps" if settings.declares("rms_norm_eps") else "norm_eps"
    return Norm(settings.number(key), 1.0 if offset else 0.0)


def layer_norm(settings: Settings) -> Norm:
    """A norm that takes the mean off, without a bias."""
    return Norm(settings.number("layer_norm_eps"), centred=True)


def biased_layer_norm(settings: Settings) -> Norm:
    """A norm that takes the mean off, with a bias."""
    return Norm(settings.number("norm_epsilon"), centred=True, bias=True)


def read_activation(settings: Settings, key: str) -> Activation:
    if (said := settings.get(key)) not in _ACTIVATIONS:
        raise UnknownDecoder(f"{settings.where} says {key} {shown(said)}, and known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[said]


def read_gated(settings: Settings, activation: str = "hidden_act") -> Gated:
    return Gated(read_activation(settings, activation), settings.count("intermediate_size"))


def read_experts(
    settings: Settings,
    count: str,
    width: str,
    *,
    norm: bool | None = None,
    key: str = "num_experts_per_tok",
    chosen: Any = None,
) -> Experts:
    """``norm``: where the family has no setting for it. ``chosen``: of this layer, where ``key`` says it for each."""
    number, chosen = settings.count(count), settings.count(key) if chosen is None else chosen
    if type(chosen) is not int or not 1 <= chosen <= number:
        raise CheckpointError(f"{settings.where} says {key} {shown(chosen)}, and has {number} experts; mend it")
    norm = bool(settings.get("norm_topk_prob")) if norm is None else norm
    return Experts(read_activation(settings, "hidden_act"), settings.count(width), number, chosen, norm)


def some_with_experts(settings: Settings, layers: Sequence[Layer], **more: Any) -> list[Layer]:
    """Layers of one MLP, some of which have Qwen's experts in its place; ``more``: of these."""
    settings.said("decoder_sparse_step", "mlp_only_layers")
    if settings.get("num_experts") == 0:
        settings.said("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        return [*layers]
    every, alone = settings.count("decoder_sparse_step"), settings.get("mlp_only_layers") or ()
    experts = replace(read_experts(settings, "num_experts", "moe_intermediate_size"), **more)
    mixed = {own: replace(own, mlp=experts) for own in {*layers}}
    places = enumerate(layers)
    return [own if number in alone or (number + 1) % every else mixed[own] for number, own in places]


def alike(settings: Settings, attention: Attention, mlp: Mlp, *, offset: bool = False, **more: Any) -> list[Layer]:
    """Layers that are all the same."""
    norm = read_norm(settings, offset=offset)
    return [Layer(attention, mlp, (norm, norm), **more)] * settings.count("num_hidden_layers")


def of_kinds(settings: Settings, full: Layer, sliding: Layer) -> list[Layer]:
    """Layers of which some have a window."""
    layers = by_type(settings, dict(zip(KINDS, (full, sliding), strict=True)))
    if sliding.attention.window is None and "sliding_attention" in settings.get("layer_types"):
        raise CheckpointError(f"{settings.where} has sliding_attention layers and no sliding_window; mend it")
    return layers


def by_mlp_type(settings: Settings, experts: Experts, full: Layer, sliding: Layer) -> list[Layer]:
    """Layers of which some have a window, and some have one MLP in place of experts, by ``mlp_layer_types``."""
    mlps: dict[str, Mlp] = {"sparse": experts, "dense": read_gated(settings)}
    kinds, each = settings.get("mlp_layer_types") or (), of_kinds(settings, full, sliding)
    if len(kinds) != len(each) or not {*kinds} <= mlps.keys():
        raise CheckpointError(f"{settings.where} says mlp_layer_types {shown(kinds)}, one of sparse and dense a layer")
    return [replace(own, mlp=mlps[kind]) for own, kind in zip(each, kinds, strict=True)]


def by_type(settings: Settings, known: Mapping[str, Layer]) -> list[Layer]:
    """The layer of each kind in ``layer_types``."""
    kinds, layers = settings.get("layer_types"), settings.count("num_hidden_layers")
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise CheckpointError(f"{settings.where} has {layers} layers and says layer_types {shown(kinds)}; mend it")
    if strange := [kind for kind in kinds if kind not in known]:
        raise UnknownDecoder(f"{settings.where} has layers of the type {shown(strange[0])}")
    return [known[kind] for kind in kinds]


def biased_mlp(settings: Settings, key: str = "mlp_bias") -> Gated:
    return replace(read_gated(settings), bias=bool(settings.get(key)))
