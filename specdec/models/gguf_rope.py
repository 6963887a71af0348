"""What a GGUF file says of rotary positions, as transformers' ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

from specdec.models.gguf_settings import GgufSettings

__all__ = ["factors_read", "read_rope", "rope_base"]

_FREQUENCIES = "rope_freqs.weight"
_SHORT, _FAR = "rope_factors_short.weight", "rope_factors_long.weight"
_LONG = ("phi3",)  # has one divisor of each frequency up to the original context, and another one beyond it
_DIVIDED = ("llama", "granite", "granitemoe", "exaone4", "mistral3")  # has one divisor of each frequency
_OWN_YARN, _BETAS = ("mistral3",), (("beta_fast", 32.0), ("beta_slow", 1.0))  # those whose files say more of YaRN


def factors_read(family: str) -> tuple[str, ...]:
    """The tensors of a file that are settings of rotary positions, and read as such."""
    return (_FREQUENCIES,) if family in _DIVIDED else (_SHORT, _FAR) if family in _LONG else ()


def rope_base(said: GgufSettings) -> float:
    return float(said.number("rope.freq_base", 10000.0))


def read_rope(said: GgufSettings, dim: int, *, partial: bool = False) -> dict[str, Any]:
    """The positions of all layers.

    Args:
        said: the file's settings.
        dim: of a head.
        partial: whether the family may turn a part of each head.

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


def _scaling(said: GgufSettings, turned: int) -> dict[str, Any]:
    kind, long = said.get("rope.scaling.type", "linear"), said.family in _LONG
    factor = float(said.number("rope.scaling.factor", said.number("rope.scale_linear", 0)) or 1.0)
    trained = said.number("rope.scaling.original_context_length", 0) or said.number("context_length")
    attention = float(said.number("rope.scaling.attn_factor", 1.0))
    own = {name: _divisors(said, name, turned) for name in factors_read(said.family)}
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


def _divisors(said: GgufSettings, name: str, turned: int) -> list[float] | None:
    """The numbers that divide the frequencies one by one; None where the file has none of this name."""
    found = said.tensor(name)
    if found is not None and len(found) != turned // 2:
        raise said.refused(f"has {len(found)} numbers in {name}, not {turned // 2}", "get it again")
    return found


def _yarn(said: GgufSettings, factor: float, trained: int, attention: float) -> dict[str, Any]:
    own = {"factor": factor, "original_max_position_embeddings": trained}
    if said.family in _OWN_YARN:
        own |= {name: float(said.number(f"rope.scaling.yarn_{name}", default)) for name, default in _BETAS}
        attention /= _magnified(factor, float(said.number("rope.scaling.yarn_log_multiplier", 0)))
    return {**own, "attention_factor": attention}


def _magnified(factor: float, by: float) -> float:
    """By how much YaRN scales cosines and sines."""
    return 1.0 + 0.1 * by * math.log(factor) if factor > 1 else 1.0
