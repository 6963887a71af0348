"""What several architectures of GGUF files say alike, as transformers has it: sizes, positions, norms and experts."""

from __future__ import annotations

import math
from typing import Any

from specdec.decoder.gguf_header import GgufHeader

__all__ = [
    "biased",
    "centred",
    "dense",
    "experts",
    "factors_read",
    "kinds_of_layers",
    "no_sections",
    "no_windows",
    "read_rope",
    "rope_base",
    "sizes",
    "turns",
    "windowed",
]

_LAYERS = 8191
_OUTPUT = "attn_output"
_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_qkv", _OUTPUT)
_ADDS_TO_OUTPUT = ("llama", "granite", "granitehybrid", "granitemoe", "mistral3")
_FREQUENCIES = "rope_freqs.weight"
_SHORT, _FAR = "rope_factors_short.weight", "rope_factors_long.weight"
_LONG = ("phi3",)  # has one divisor of each frequency up to the original context, and another one beyond it
_DIVIDED = (
    "llama",
    "granite",
    "granitehybrid",
    "granitemoe",
    "exaone4",
    "mistral3",
)  # has one divisor of each frequency
_OWN_YARN, _BETAS = ("mistral3",), (("beta_fast", 32.0), ("beta_slow", 1.0))  # those whose files say more of YaRN


def factors_read(architecture: str) -> tuple[str, ...]:
    """The tensors of a file that are settings of rotary positions, and read as such."""
    return (_FREQUENCIES,) if architecture in _DIVIDED else (_SHORT, _FAR) if architecture in _LONG else ()


def rope_base(said: GgufHeader) -> float:
    return float(said.number("rope.freq_base", 10000.0))


def read_rope(said: GgufHeader, dim: int, *, partial: bool = False) -> dict[str, Any]:
    """The positions of all layers.

    Args:
        said: the file's settings.
        dim: of a head.
        partial: whether the architecture may turn a part of each head.

    Raises:
        CheckpointError: they are scaled in a way that is not read.
    """
    turned = said.number("rope.dimension_count", dim)
    if not partial:
        said.only("rope.dimension_count", dim)
    elif type(turned) is not int or not 2 <= turned <= dim or turned % 2 or int(dim * (turned / dim)) != turned:
        raise said.refused(f"turns {turned} of the {dim} values of a head, and an even number of them is needed")
    part = {"partial_rotary_factor": turned / dim} if partial else {}
    return {"rope_theta": rope_base(said), **part, **_scaling(said, int(turned))}


def _scaling(said: GgufHeader, turned: int) -> dict[str, Any]:
    kind, long = said.get("rope.scaling.type", "linear"), said.architecture in _LONG
    factor = float(said.number("rope.scaling.factor", said.number("rope.scale_linear", 0)) or 1.0)
    trained = said.number("rope.scaling.original_context_length", 0) or said.number("context_length")
    attention = float(said.number("rope.scaling.attn_factor", 1.0))
    own = {name: _divisors(said, name, turned) for name in factors_read(said.architecture)}
    if kind not in ("none", "linear", "yarn", *(("longrope",) if long else ())):
        raise said.refused(
            f"scales its rotary frequencies (rope.scaling.type {kind!r}), which is not read from GGUF here: the model "
            "would be another one"
        )
    if kind == "none":
        factor = 1.0
    yarn, divided = kind == "yarn" and factor != 1, any(own.values())
    if yarn:
        if divided:
            raise said.refused(f"scales its rotary frequencies twice, by {', '.join(own)} and YaRN", "get it again")
        attention *= _magnified(factor, 1.0)
    if attention <= 0 or (factor != 1 and rope_base(said) <= 1):
        raise said.refused(
            f"scales cosines and sines by {attention}, with a base of {rope_base(said)}: it has no positions",
            "get it again",
        )
    if yarn:
        return {"rope_type": "yarn", **_yarn(said, factor, trained, attention)}
    if not divided and attention == 1 and (factor == 1 or not long):
        return {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    ones = [1.0] * (turned // 2)
    short, far = (own.get(name) or own.get(_FREQUENCIES) or ones for name in (_SHORT, _FAR))
    return {  # the one kind of transformers' that divides each frequency by a number of its own
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": attention,
        "short_factor": [factor * one for one in short],
        "long_factor": [factor * one for one in far],
        "original_max_position_embeddings": trained if long and divided else said.number("context_length"),
    }


def _divisors(said: GgufHeader, name: str, turned: int) -> list[float] | None:
    """The numbers that divide the frequencies one by one; None where the file has none of this name."""
    found = said.tensor(name)
    if found is not None and len(found) != turned // 2:
        raise said.refused(f"has {len(found)} numbers in {name}, not {turned // 2}", "get it again")
    return found


def _yarn(said: GgufHeader, factor: float, trained: int, attention: float) -> dict[str, Any]:
    own = {"factor": factor, "original_max_position_embeddings": trained}
    if said.architecture in _OWN_YARN:
        own |= {name: float(said.number(f"rope.scaling.yarn_{name}", default)) for name, default in _BETAS}
        attention /= _magnified(factor, float(said.number("rope.scaling.yarn_log_multiplier", 0)))
    return {**own, "attention_factor": attention}


def _magnified(factor: float, by: float) -> float:
    """By how much YaRN scales cosines and sines."""
    return 1.0 + 0.1 * by * math.log(factor) if factor > 1 else 1.0


def turns(said: GgufHeader, *, partial: bool = False) -> dict[str, Any]:
    """Rotary positions that all layers share."""
    return {"rope_parameters": read_rope(said, said.heads[1], partial=partial)}


def sizes(said: GgufHeader) -> dict[str, Any]:
    """Sizes of the model, whose heads are all of one width."""
    heads, dim = said.heads
    layers = said.layers
    if not 1 <= layers <= _LAYERS:
        raise said.refused(f"says {layers} layers", "get it again")
    said.only("attention.value_length", dim)
    return {
        "vocab_size": said.vocabulary,
        "max_position_embeddings": said.number("context_length"),
        "hidden_size": said.number("embedding_length"),
        "num_hidden_layers": layers,
        "intermediate_size": said.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.number("attention.head_count_kv", heads),
        "head_dim": dim,
        "tie_word_embeddings": "output.weight" not in said.names,
    }


def dense(said: GgufHeader, model_type: str, **activation: str) -> dict[str, Any]:
    """A model without experts, with RMS norms; ``activation``: silu if not given."""
    _no_experts(said)
    return {"model_type": model_type, **(activation or {"hidden_act": "silu"}), **_rms_norm(said)}


def centred(said: GgufHeader, model_type: str, epsilon: str, **activation: str) -> dict[str, Any]:
    """A model without experts, with norms that centre; ``epsilon``: the key of theirs."""
    _no_experts(said)
    return {"model_type": model_type, **activation, epsilon: float(said.number("attention.layer_norm_epsilon"))}


def _no_experts(said: GgufHeader) -> None:
    said.only("expert_count", 0)
    said.only("expert_used_count", 0)


def _rms_norm(said: GgufHeader) -> dict[str, Any]:
    return {"rms_norm_eps": float(said.number("attention.layer_norm_rms_epsilon"))}


def biased(said: GgufHeader, *names: str) -> bool:
    """Whether one of these tensors, or of attention's, has a bias in some layer; those that a file lacks are 0.

    Raises:
        CheckpointError: attention's output has one, and llama.cpp adds none in this architecture.
    """
    found = {name.split(".")[-2] for name in said.names if name.startswith("blk.") and name.endswith(".bias")}
    if not names and _OUTPUT in found and said.architecture not in _ADDS_TO_OUTPUT:
        raise said.refused(f"has biases of {_OUTPUT}, which llama.cpp does not add for {said.architecture}")
    return not found.isdisjoint(names or _ATTENTION)


def experts(said: GgufHeader, model_type: str, count: str, *, width: str = "") -> dict[str, Any]:
    """A model of experts, with RMS norms.

    Args:
        said: the file's header.
        model_type: transformers' name of the family.
        count: the key for how many there are.
        width: that for the width of one, where the family has a key for it.
    """
    there, chosen = said.number("expert_count"), said.number("expert_used_count")
    if not 1 <= chosen <= there:
        raise said.refused(f"has {there} experts, of which a token goes to {chosen}", "get it again")
    own = {"model_type": model_type, count: there, "num_experts_per_tok": chosen, "hidden_act": "silu"}
    if width:
        own[width] = int(said.number("expert_feed_forward_length", said.number("feed_forward_length") // chosen))
    return {**own, **_rms_norm(said)}


def no_sections(said: GgufHeader) -> None:
    """Raises CheckpointError where positions are of several dimensions, as of images."""
    sections = said.get("rope.dimension_sections")
    if any(sections if isinstance(sections, list) else [sections]):
        raise said.refused(
            f"says {said.architecture}.rope.dimension_sections {sections}, and only text is read from GGUF"
        )


def windowed(said: GgufHeader, every: int) -> list[bool]:
    """Which layers have a window: all but each ``every``-th one, unless the file says which."""
    layers, pattern = said.layers, said.get("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        return [bool(one) for one in pattern[:layers]]
    return [not pattern or layer % pattern < pattern - 1 for layer in range(layers)]


def kinds_of_layers(local: list[bool]) -> dict[str, Any]:
    """The kind of each layer, which has a window or none."""
    return {"layer_types": ["sliding_attention" if here else "full_attention" for here in local]}


def no_windows(said: GgufHeader) -> dict[str, Any]:
    """Of a family that has them elsewhere."""
    return {"use_sliding_window": False, **kinds_of_layers([False] * said.layers)}
