"""Rope settings: the rotary positions that a config's ``rope_parameters`` describe."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from specdec.decoder.rope_scaling import Dynamic, Linear, Llama3, LongRope, RopeScaling, Yarn
from specdec.decoder.settings import Settings
from specdec.decoder.spec import Rope, UnknownDecoder
from specdec.errors import CheckpointError, SpecdecWarning, shown

__all__ = ["read_growth", "read_rope", "read_ropes", "rope_context", "rope_depends_on_length", "rope_kinds"]

_KEYS = ("rope_type", "type", "rope_theta")
_GROWTH = ("llama_4_scaling_beta", "original_max_position_embeddings")  # of queries with their positions
_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
"""Kind of scaling -> what it reads besides ``_KEYS``."""


def read_rope(
    settings: Settings, head_dim: int, *, partial: bool = False, grows: bool = False, alpha: bool = False
) -> Rope:
    """The one kind of rotary positions of a model.

    Args:
        settings: the model's.
        head_dim: of a head.
        partial: its plain frequencies may be of a part of a head.
        grows: its queries grow with their positions, by keys beside those of frequencies.
        alpha: its kind ``dynamic`` may have one base for all lengths (NTK), by this key.

    Raises:
        UnknownDecoder: a kind of scaling that is not described.
        CheckpointError: a value is missing, or no number.
    """
    own = _parameters(settings)
    if alpha and _kind(own) == "dynamic" and own.get("alpha"):
        read = Settings(own, where=f"rope_parameters of {settings.where}")
        base, by = read.number("rope_theta"), read.number("alpha")
        return Rope(head_dim, base * by ** (head_dim / (head_dim - 2)))
    beside = (*_GROWTH, "max_position_embeddings") if grows else ()
    return _rope(settings, "rope_parameters", own, head_dim, partial, beside)


def read_growth(settings: Settings) -> tuple[float, int]:
    """By how much queries grow with their positions, 0 for not at all, and after how many positions again."""
    read = Settings(_parameters(settings), where=f"rope_parameters of {settings.where}")
    by, every = _GROWTH
    return 0.0 if read.get(by) == 0 else read.number(by), read.count(every)


def read_ropes(settings: Settings, head_dim: int, kinds: tuple[str, ...], *, partial: bool = False) -> dict[str, Rope]:
    """Those of each kind of layer; as :func:`read_rope`."""
    own, layers = _parameters(settings), {*(settings.get("layer_types") or ())}
    asked = [kind for kind in kinds if kind in layers or kind in own] or kinds
    found = {kind: _rope(settings, f"rope_parameters[{kind!r}]", own.get(kind), head_dim, partial) for kind in asked}
    return {kind: found.get(kind, found[asked[0]]) for kind in kinds}  # of a kind without layers, any


def rope_context(settings: Settings) -> int:
    """Longest text in tokens. Where frequencies depend on the length, the length up to which they do not."""
    longest = settings.count("max_position_embeddings")
    changing = filter(rope_depends_on_length, _kinds(_parameters(settings)))
    limits = [one.get("original_max_position_embeddings") for one in changing]
    return min([longest, *(int(limit) for limit in limits if limit)])


def rope_kinds(config: Any) -> list[Mapping[str, Any]]:
    """The rope parameters of each kind of attention in a config; one entry where all layers share them."""
    return _kinds(getattr(config, "rope_parameters", None) or {})


def rope_depends_on_length(own: Mapping[str, Any]) -> bool:
    """Whether frequencies change with the length of the text."""
    return "dynamic" in _kind(own) or _kind(own) == "longrope"


def _kinds(own: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [values for values in own.values() if isinstance(values, Mapping)] or [own]


def _parameters(settings: Settings) -> Mapping[str, Any]:
    own = settings.get("rope_parameters")
    if not isinstance(own, Mapping):
        raise CheckpointError(f"{settings.where} has no rope_parameters, but {shown(own)}; mend its config")
    return own


def _kind(own: Mapping[str, Any]) -> str:
    return str(own.get("rope_type") or own.get("type") or "default")


def _rope(settings: Settings, where: str, own: Any, head_dim: int, partial: bool, beside: tuple[str, ...] = ()) -> Rope:
    if not isinstance(own, Mapping):
        raise CheckpointError(f"{settings.where} says {where} {shown(own)}, and it must be a table; mend its config")
    kind = _kind(own)
    if kind not in _BY_TYPE:
        raise UnknownDecoder(f"{where} of {settings.where} has the rope_type {shown(kind)}")
    read = Settings(own, where=f"{where} of {settings.where}")
    # Whatever scales reads the part of a head that turns; plain frequencies are of all of it in most families.
    whole = (kind == "default" and not partial) or own.get("partial_rotary_factor") is None
    part = 1.0 if whole else read.number("partial_rotary_factor")
    dim, base = int(head_dim * part), read.number("rope_theta")
    scaling = None if kind == "default" else _scaling(kind, read, settings, base, dim)
    known = {*_KEYS, *_BY_TYPE[kind], "partial_rotary_factor", *beside}
    if left := sorted(key for key, value in own.items() if key not in known and value is not None):
        warnings.warn(
            f"{read.where} says {left[0]} {shown(own[left[0]])}, which the rope_type {kind!r} does not read: it is "
            "ignored, as transformers ignores it",
            SpecdecWarning,
            stacklevel=2,
        )
    return Rope(dim, base, scaling)


def _scaling(kind: str, read: Settings, settings: Settings, base: float, dim: int) -> RopeScaling:
    if kind == "linear":
        return Linear(read.number("factor"))
    if kind == "dynamic":
        return Dynamic(read.number("factor"), settings.count("max_position_embeddings"))
    trained = read.count("original_max_position_embeddings")
    if kind == "llama3":
        return Llama3(read.number("factor"), read.number("low_freq_factor"), read.number("high_freq_factor"), trained)
    given = read.get("factor")
    factor = settings.count("max_position_embeddings") / trained if given is None else read.number("factor")
    attention = None if read.get("attention_factor") is None else read.number("attention_factor")
    if kind == "longrope":
        factors = read.get("short_factor")
        if not isinstance(factors, list | tuple) or len(factors) != dim // 2:
            raise CheckpointError(f"{read.where} says short_factor {shown(factors)}, not {dim // 2} numbers; mend it")
        spread = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
        return LongRope(tuple(map(float, factors)), spread if attention is None else attention)
    fast, slow = (read.get(name) or usual for name, usual in (("beta_fast", 32), ("beta_slow", 1)))
    whole = bool(_parameters(settings).get("truncate", True))  # transformers looks beside the kinds of layers
    own = _yarn_attention(factor, read.get("mscale"), read.get("mscale_all_dim"))
    return Yarn(factor, trained, float(fast), float(slow), whole, own if attention is None else attention)


def _yarn_attention(factor: float, scale: Any, all_dim: Any) -> float:
    """What YaRN multiplies cosines and sines by where the config does not say it."""

    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    return float(grown(scale) / grown(all_dim)) if scale and all_dim else grown(1)
