"""Families whose layers torch alone computes: other norms, no positions or those of a part, scales, convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.decoder.family_parts import (
    KINDS,
    added_biases,
    alike,
    biased_layer_norm,
    biased_mlp,
    biases_of,
    by_mlp_type,
    by_type,
    head_dim_of,
    layer_norm,
    of_kinds,
    read_activation,
    read_attention,
    read_experts,
    read_gated,
    read_norm,
    some_with_experts,
    window_of,
)
from specdec.decoder.rope_settings import read_growth, read_rope, read_ropes
from specdec.decoder.settings import Settings
from specdec.decoder.spec import (
    Attention,
    Clamp,
    Experts,
    Gated,
    Growth,
    Layer,
    Mlp,
    Plain,
    ShortConv,
    Sigmoid,
    UnknownDecoder,
)
from specdec.errors import CheckpointError, shown

__all__ = [
    "cohere",
    "cohere2",
    "exaone4",
    "exaone_moe",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granite_hybrid",
    "granite_moe",
    "granite_scales",
    "hunyuan",
    "hunyuan_moe",
    "lfm2",
    "logit_scale",
    "ministral3",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2_moe",
    "smollm3",
    "starcoder2",
]


def granite(settings: Settings) -> list[Layer]:
    return [_granite_layer(settings, biased_mlp(settings))] * settings.count("num_hidden_layers")


def granite_moe(settings: Settings, *, shared: bool = False) -> list[Layer]:
    """``shared``: the family has a setting for an expert that each row has."""
    experts = _granite_experts(settings, settings.get("shared_intermediate_size") if shared else 0)
    return [_granite_layer(settings, experts)] * settings.count("num_hidden_layers")


def granite_hybrid(settings: Settings) -> list[Layer]:
    """Granite 4.0 without recurrent layers, in which the expert that each row has may be the only one."""
    settings.said(*(f"mamba_{one}" for one in ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand")))
    settings.said("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit")
    settings.said("normalization_function")  # published, and read by no class
    width = settings.count("shared_intermediate_size")
    own = _granite_layer(settings, Gated(read_activation(settings, "hidden_act"), width))
    if settings.get("num_local_experts"):
        own = replace(own, mlp=_granite_experts(settings, width))
    settings.said("intermediate_size", "num_experts_per_tok")  # of the others
    own = own if settings.get("position_embedding_type") == "rope" else _without_rope(own)
    return by_type(settings, {"full_attention": own})


def _granite_experts(settings: Settings, shared: int | None) -> Experts:
    experts = read_experts(settings, "num_local_experts", "intermediate_size", norm=True)
    return replace(experts, shared=int(shared or 0))


def _granite_layer(settings: Settings, mlp: Mlp) -> Layer:
    norm, scale = read_norm(settings), settings.number("attention_multiplier")
    attention = read_attention(settings, bias=biases_of(settings), scale=scale)
    return Layer(attention, mlp, (norm, norm), scale=settings.number("residual_multiplier"))


def granite_scales(settings: Settings) -> tuple[float, float]:
    return settings.number("embedding_multiplier"), 1 / settings.number("logits_scaling")


def smollm3(settings: Settings) -> list[Layer]:
    settings.said("no_rope_layer_interval")  # no_rope_layers says what follows of it
    settings.said("use_sliding_window")  # layer_types says what follows of it
    norm, attention = read_norm(settings), read_attention(settings, bias=biases_of(settings))
    own = Layer(attention, biased_mlp(settings), (norm, norm))
    layers = of_kinds(settings, own, replace(own, mixer=replace(attention, window=window_of(settings))))
    turns = settings.get("no_rope_layers")
    if not isinstance(turns, list | tuple) or len(turns) < len(layers):
        raise CheckpointError(
            f"{settings.where} has {len(layers)} layers and says no_rope_layers {shown(turns)}; mend it"
        )
    bare = {one: _without_rope(one) for one in {*layers}}
    return [one if turned else bare[one] for one, turned in zip(layers, turns, strict=False)]


def _without_rope(layer: Layer) -> Layer:
    rope = replace(layer.attention.rope, dim=0, scaling=None)
    return replace(layer, mixer=replace(layer.attention, rope=rope))


def phi3(settings: Settings) -> list[Layer]:
    settings.said("resid_pdrop", "embd_pdrop")
    settings.said("original_max_position_embeddings", "partial_rotary_factor")  # in rope_parameters
    attention = read_attention(settings, partial=True, bias=added_biases(settings), window=window_of(settings))
    return alike(settings, attention, read_gated(settings))


def glm(settings: Settings, **more: Any) -> list[Layer]:
    settings.said("partial_rotary_factor")  # in rope_parameters
    attention = read_attention(settings, partial=True, bias=(bool(settings.get("attention_bias")), False))
    return alike(settings, attention, read_gated(settings), **more)


def glm4(settings: Settings) -> list[Layer]:
    norm = read_norm(settings)
    return glm(settings, after=(norm, norm))


def olmo2(settings: Settings) -> list[Layer]:
    return [_normed_after(settings)] * settings.count("num_hidden_layers")


def olmo3(settings: Settings) -> list[Layer]:
    ropes = read_ropes(settings, head_dim_of(settings), KINDS)
    full, sliding = (_normed_after(settings, rope=ropes[kind]) for kind in KINDS)
    return of_kinds(settings, full, replace(sliding, mixer=replace(sliding.attention, window=window_of(settings))))


def _normed_after(settings: Settings, **more: Any) -> Layer:
    """A layer of OLMo 2 and 3, whose norms are behind attention and MLP."""
    norm = read_norm(settings)
    attention = read_attention(settings, bias=biases_of(settings), qk_norm=norm, norms_all=True, **more)
    return Layer(attention, read_gated(settings), (None, None), (norm, norm))


def exaone4(settings: Settings) -> list[Layer]:
    settings.said("sliding_window_pattern")  # in layer_types
    norm, window = read_norm(settings), window_of(settings)
    attention = read_attention(settings, bias=added_biases(settings), qk_norm=norm)
    own = Layer(attention, read_gated(settings), (None, None), (norm, norm))
    full = own if window is None else _without_rope(own)
    return of_kinds(settings, full, replace(own, mixer=replace(own.attention, window=window)))


def exaone_moe(settings: Settings) -> list[Layer]:
    settings.said("sliding_window_pattern", "first_k_dense_replace")  # in layer_types and mlp_layer_types
    norm, experts = read_norm(settings), _by_sigmoids(settings, "num_experts", "num_shared_experts")
    own = Layer(read_attention(settings, qk_norm=norm), experts, (norm, norm))
    sliding = replace(own, mixer=replace(own.attention, window=window_of(settings)))
    return by_mlp_type(settings, experts, _without_rope(own), sliding)


def _by_sigmoids(settings: Settings, count: str, shared: str) -> Experts:
    """DeepSeek-V3's experts."""
    router = Sigmoid(settings.count("n_group"), settings.count("topk_group"), settings.number("routed_scaling_factor"))
    experts = read_experts(settings, count, "moe_intermediate_size")
    if experts.count % router.groups or (router.best < router.groups and experts.count < 2 * router.groups):
        raise CheckpointError(f"{settings.where} says n_group {router.groups} of its {experts.count} experts; mend it")
    return replace(experts, router=router, shared=experts.width * int(settings.get(shared) or 0))


def cohere(settings: Settings) -> list[Layer]:
    own = _beside(settings)
    if settings.get("use_qk_norm"):
        own = replace(own, mixer=replace(own.attention, qk_norm=layer_norm(settings), norms_own=True))
    return [own] * settings.count("num_hidden_layers")


def cohere2(settings: Settings) -> list[Layer]:
    own = _beside(settings)
    sliding = replace(own, mixer=replace(own.attention, window=window_of(settings)))
    return of_kinds(settings, _without_rope(own), sliding)


def _beside(settings: Settings) -> Layer:
    """A layer of Command R, whose MLP runs beside attention."""
    attention = read_attention(settings, bias=biases_of(settings))
    return Layer(attention, read_gated(settings), (layer_norm(settings), None), parallel=True)


def starcoder2(settings: Settings) -> list[Layer]:
    settings.said("residual_dropout", "embedding_dropout")
    bias, norm = bool(settings.get("use_bias")), biased_layer_norm(settings)
    mlp = Plain(read_activation(settings, "hidden_act"), settings.count("intermediate_size"), bias)
    attention = read_attention(settings, bias=(bias, bias), window=window_of(settings))
    return [Layer(attention, mlp, (norm, norm))] * settings.count("num_hidden_layers")


def logit_scale(settings: Settings) -> tuple[float, float]:
    return 1.0, settings.number("logit_scale")


def lfm2(settings: Settings) -> list[Layer]:
    settings.said("full_attn_idxs")  # in layer_types
    if "full_attention" not in (settings.get("layer_types") or ()):
        raise UnknownDecoder(f"{settings.where} has no layer of the type full_attention")
    settings.said("block_norm_eps", "block_mlp_init_scale", "block_out_init_scale")  # published, and read by no class
    width, norm = settings.count("intermediate_size"), read_norm(settings)
    multiple, factor = settings.count("block_multiple_of"), settings.get("block_ffn_dim_multiplier")
    if settings.get("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        width = width if factor is None else -(-int(factor * width) // multiple) * multiple
    own = Layer(read_attention(settings, qk_norm=norm), Gated("silu", width), (norm, norm))
    mixer = ShortConv(settings.count("conv_L_cache"), bool(settings.get("conv_bias")))
    return by_type(settings, {"full_attention": own, "conv": replace(own, mixer=mixer)})


def glm4_moe(settings: Settings) -> list[Layer]:
    norm, rope = read_norm(settings), read_rope(settings, head_dim_of(settings), partial=True)
    normed = norm if settings.get("use_qk_norm") else None
    attention = read_attention(settings, partial=True, bias=(biases_of(settings)[0], False), qk_norm=normed, rope=rope)
    experts = _by_sigmoids(settings, "n_routed_experts", "n_shared_experts")
    dense, mixed = (Layer(attention, mlp, (norm, norm)) for mlp in (read_gated(settings), experts))
    first = int(settings.get("first_k_dense_replace") or 0)
    return [dense if number < first else mixed for number in range(settings.count("num_hidden_layers"))]


def gpt_oss(settings: Settings) -> list[Layer]:
    settings.said("experts_per_token", "initial_context_length")  # published, and read by no class
    clamp, norm = Clamp(settings.number("swiglu_alpha"), settings.number("swiglu_limit")), read_norm(settings)
    experts = read_experts(settings, "num_local_experts", "intermediate_size", norm=True)
    attention = read_attention(settings, bias=biases_of(settings), sinks=True)
    own = Layer(attention, replace(experts, bias=True, clamp=clamp), (norm, norm))
    return of_kinds(settings, own, replace(own, mixer=replace(attention, window=window_of(settings))))


def ministral3(settings: Settings) -> list[Layer]:
    by, every = read_growth(settings)
    rope, growth = read_rope(settings, head_dim_of(settings), grows=True), Growth(by, every) if by else None
    more: dict[str, Any] = {"bias": added_biases(settings), "window": window_of(settings)}
    attention = read_attention(settings, rope=rope, growth=growth, **more)
    return alike(settings, attention, read_gated(settings))


def qwen2_moe(settings: Settings) -> list[Layer]:
    settings.said("max_window_layers")  # in layer_types
    window = window_of(settings) if settings.get("use_sliding_window") else None
    settings.said("sliding_window")  # of 0 where it is not to be used
    norm, shared = read_norm(settings), settings.count("shared_expert_intermediate_size")
    attention = read_attention(settings, bias=(bool(settings.get("qkv_bias")), False))
    dense = Layer(attention, read_gated(settings), (norm, norm))
    layers = of_kinds(settings, dense, replace(dense, mixer=replace(attention, window=window)))
    return some_with_experts(settings, layers, shared=shared, shared_gate=True)


def hunyuan(settings: Settings) -> list[Layer]:
    return alike(settings, _normed_after_turning(settings), read_gated(settings))


def hunyuan_moe(settings: Settings) -> list[Layer]:
    """Layers that differ in how many experts a row has, at most."""
    number, said = settings.count("num_hidden_layers"), settings.get("moe_topk")
    each = said if isinstance(said, list | tuple) else [said] * number
    if len(each) != number:
        raise CheckpointError(f"{settings.where} has {number} layers and says moe_topk {shown(said)}; mend it")
    norm, attention, width = read_norm(settings), _normed_after_turning(settings), settings.count("intermediate_size")
    known = dict[int, Layer]()
    for count in each:
        own = read_experts(settings, "num_experts", "intermediate_size", norm=True, key="moe_topk", chosen=count)
        known.setdefault(count, Layer(attention, replace(own, shared=width), (norm, norm)))
    return [known[count] for count in each]


def _normed_after_turning(settings: Settings) -> Attention:
    settings.said("eod_token_id")  # an end
    settings.said("use_qk_norm", "norm_type", "norm_topk_prob", "num_shared_expert")  # published, read by no class
    rope = read_rope(settings, head_dim_of(settings), alpha=True)
    return read_attention(settings, bias=biases_of(settings), qk_norm=read_norm(settings), norms_after=True, rope=rope)
