"""What heads of every kind compute, from their configs."""

from __future__ import annotations

from drafters.heads.config import ACTIVATIONS, BlockConfig, ChainConfig, HeadConfig
from specdec.decoder.head_spec import HeadSpec
from specdec.decoder.rope_settings import read_rope, rope_context, rope_depends_on_length
from specdec.decoder.settings import Settings
from specdec.decoder.spec import Attention, Gated, Layer, Norm, Rope, UnknownDecoder
from specdec.errors import CheckpointError, first_line, shown

__all__ = ["check_positions", "head_spec"]


def head_spec(config: HeadConfig) -> HeadSpec:
    """What a head computes.

    Raises:
        CheckpointError: its rotary positions are of no known kind.
    """
    norm, layers = Norm(config.norm_eps, rounds_first=True), _layers(config)
    if isinstance(config, BlockConfig):
        return HeadSpec(layers, config.width, "fc", fused_norm=norm, onward="normed", norm=norm)
    assert isinstance(config, ChainConfig)
    if config.kind == "eagle":
        return HeadSpec(layers, config.width, "join", residual="joined")
    counts = {"none": 0, "whole": 1, "each": len(config.taps)}
    return HeadSpec(
        layers,
        config.width,
        "fc" if config.fused else "none",
        input_norms=(norm,) * counts[config.norm_inputs],
        joined_first=(norm, norm),
        residual="normed" if config.norm_before_residual else "hidden",
        onward="normed" if config.norm_output else "stream",
        norm=norm,
    )


def _layers(config: HeadConfig) -> tuple[Layer, ...]:
    """The layers; a chain's first one norms nothing that its attention reads."""
    rope, norm, chain = _rope(config), Norm(config.norm_eps, rounds_first=True), isinstance(config, ChainConfig)
    mlp = Gated(ACTIVATIONS[config.activation], config.intermediate_size, config.mlp_bias)
    found = []
    for place in range(config.layers):
        attention = Attention(
            config.heads,
            config.key_heads,
            config.head_dim,
            config.head_dim**-0.5,
            rope,
            window=config.window(place) if chain else None,  # a block's rows see spans
            qk_norm=norm if config.qk_norm else None,
            bias=(config.attention_bias, config.output_bias),
        )
        found.append(Layer(attention, mlp, (None if chain and not place else norm, norm)))
    return tuple(found)


def check_positions(config: HeadConfig, context: int) -> None:
    """Raises CheckpointError where texts of ``context`` tokens have positions that depend on the text's length."""
    if rope_depends_on_length(config.rope) and context > (longest := rope_context(_settings(config))):
        raise CheckpointError(
            f"the head's rotary positions, of rope_type {config.rope['rope_type']!r}, depend on the text's length "
            f"beyond {longest} tokens, and its target reads {context}; load the model with max_model_len={longest} or "
            "less, or take another head"
        )


def _settings(config: HeadConfig) -> Settings:
    rope = {"rope_theta": 10000.0, **config.rope}
    if rope.get("rope_type") in ("llama3", "longrope", "yarn"):
        rope.setdefault("original_max_position_embeddings", config.positions)
    return Settings({"rope_parameters": rope, "max_position_embeddings": config.positions}, where="its config.json")


def _rope(config: HeadConfig) -> Rope:
    try:
        rope = read_rope(_settings(config), config.head_dim)
    except (UnknownDecoder, CheckpointError) as error:
        raise CheckpointError(
            f"the head's rotary positions, {shown(config.rope)}, are of no kind that specdec knows "
            f"({first_line(error)}); they stand as rope_theta, rope_scaling or rope_parameters in its config.json"
        ) from error
    if rope.dim != config.head_dim:
        raise CheckpointError(
            f"the head's rotary positions, {shown(config.rope)}, turn {rope.dim} of the {config.head_dim} values of a "
            "query, and specdec's heads turn all of them; take another head"
        )
    return rope
