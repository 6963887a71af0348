"""What several architectures of GGUF files say alike: positions, norms, biases, experts and windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.models.gguf_rope import read_rope
from specdec.models.gguf_settings import GgufSettings

__all__ = [
    "biases",
    "dense",
    "expert_width",
    "experts",
    "kinds_of_layers",
    "layer_norm",
    "no_experts",
    "no_sections",
    "rms_norm",
    "turns",
    "windowed",
]


def turns(said: GgufSettings, *, partial: bool = False) -> dict[str, Any]:
    """Rotary positions that all layers share."""
    return {"rope_parameters": read_rope(said, said.heads[1], partial=partial)}


def rms_norm(said: GgufSettings) -> dict[str, Any]:
    return {"rms_norm_eps": float(said.number("attention.layer_norm_rms_epsilon"))}


def layer_norm(said: GgufSettings) -> float:
    return float(said.number("attention.layer_norm_epsilon"))


def no_experts(said: GgufSettings) -> None:
    said.only("expert_count", 0)
    said.only("expert_used_count", 0)


def dense(said: GgufSettings, model_type: str) -> dict[str, Any]:
    """A model without experts, with RMS norms."""
    no_experts(said)
    return {"model_type": model_type, **rms_norm(said)}


def biases(said: GgufSettings) -> dict[str, Any]:
    """Whether products of attention have biases; those that a file lacks are 0."""
    kinds = (("q", "k", "v", "output"), ("gate", "up", "down"))
    attention, mlp = (
        any(f"blk.0.{place}_{part}.bias" in said.names for part in parts)
        for place, parts in zip(("attn", "ffn"), kinds, strict=True)
    )
    return {"attention_bias": attention, "mlp_bias": mlp}


def experts(said: GgufSettings, count: str) -> dict[str, Any]:
    there, chosen = said.number("expert_count"), said.number("expert_used_count")
    if not 1 <= chosen <= there:
        raise said.refused(f"has {there} experts, of which a token goes to {chosen}", "get it again")
    return {count: there, "num_experts_per_tok": chosen}


def expert_width(said: GgufSettings) -> int:
    """Width of an expert."""
    wide, chosen = said.number("feed_forward_length"), said.number("expert_used_count")
    return int(said.number("expert_feed_forward_length", wide // max(chosen, 1)))


def no_sections(said: GgufSettings) -> None:
    """Raises CheckpointError where positions are of several dimensions, as of images."""
    sections = said.get("rope.dimension_sections")
    if any(sections if isinstance(sections, list) else [sections]):
        raise said.refused(f"says {said.family}.rope.dimension_sections {sections}, and only text is read from GGUF")


def windowed(said: GgufSettings, every: int) -> list[bool]:
    """Which layers have a window: all but each ``every``-th one, unless the file says which."""
    layers, pattern = said.number("block_count"), said.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [bool(one) for one in pattern[:layers]]
    return [not pattern or layer % pattern < pattern - 1 for layer in range(layers)]


def kinds_of_layers(local: Sequence[bool]) -> dict[str, Any]:
    return {"layer_types": ["sliding_attention" if here else "full_attention" for here in local]}
