"""What a GGUF file says of rotary positions, as transformers' ``rope_parameters``."""

from __future__ import annotations

import math
from typing import Any

from specdec.models.gguf_settings import GgufSettings

__all__ = ["factors_read", "read_rope", "rope_base"]

_FREQUENCIES = "rope_freqs.weight"
_DIVIDED = ("llama", "granite", "exaone4", "mistral3")  # llama.cpp looks for a divisor of each frequency in their files


def factors_read(family: str) -> tuple[str, ...]:
    """The tensors of a file that are settings of rotary positions, and read as such."""
    return (_FREQUENCIES,) if family in _DIVIDED else ()


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
    kind = said.get("rope.scaling.type", "linear")
    factor = float(said.number("rope.scaling.factor", said.number("rope.scale_linear", 0)) or 1.0)
    trained = said.number("rope.scaling.original_context_length", 0) or said.number("context_length")
    attention = float(said.number("rope.scaling.attn_factor", 1.0))
    divisors = said.tensor(_FREQUENCIES) if _FREQUENCIES in factors_read(said.family) else None
    if kind not in ("none", "linear", "yarn"):
        raise said.refused(
            f"scales its rotary frequencies (rope.scaling.type {kind!r}), which is not read from GGUF here: the model "
            "would be another one"
        )
    if kind == "none":
        factor = 1.0
    yarn = kind == "yarn" and factor != 1
    if yarn:
        if divisors is not None:
            raise said.refused(f"scales its rotary frequencies twice, by {_FREQUENCIES} and YaRN", "get it again")
        attention *= 1.0 + 0.1 * math.log(factor)
    if attention <= 0 or (factor != 1 and rope_base(said) <= 1):
        raise said.refused(
            f"scales cosines and sines by {attention}, with a base of {rope_base(said)}: it has no positions",
            "get it again",
        )
    if yarn:
        own = {"factor": factor, "original_max_position_embeddings": trained, "attention_factor": attention}
        return {"rope_type": "yarn", **own}
    if divisors is None and attention == 1:
        return {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    if divisors is not None and len(divisors) != turned // 2:
        raise said.refused(f"has {len(divisors)} numbers in {_FREQUENCIES}, not {turned // 2}", "get it again")
    each = [factor * one for one in divisors or [1.0] * (turned // 2)]
    return {  # the one kind of transformers' that divides each frequency by a number of its own
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": attention,
        "short_factor": each,
        "long_factor": each,
        "original_max_position_embeddings": said.number("context_length"),
    }
