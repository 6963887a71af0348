"""What an executor computes of a description: a closed list of the knobs that it knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

__all__ = ["LIKE_LLAMA", "unlike"]

LIKE_LLAMA = frozenset({
    *("DecoderSpec", "Layer", "Attention", "Gated", "Norm", "Embedding", "Head"),
    *("Rope", "Rope.scaling", "Linear", "Dynamic", "Llama3", "Yarn", "LongRope"),
    *("Attention.window", "Attention.qk_norm", "Attention.bias", "Gated.bias", "silu"),
})  # fmt: skip
"""Parts of a description, those of their fields that need not be at their default, and activations."""


def unlike(own: Any, known: Collection[str], who: str, name: str = "") -> str | None:
    """The first thing in a description that is not computed, as a reason; None where there is none.

    Whole heads turn, and nothing in a pair of norms may be left out.

    Args:
        own: the description, or a part of it.
        known: what is computed, as in ``LIKE_LLAMA``.
        who: the same as a sentence.
        name: of the part.
    """
    if isinstance(own, tuple):
        pairs = ((value, f"{name}.{number}") for number, value in enumerate(own))
        each = (
            f"{who}, and here {at} is None" if value is None else unlike(value, known, who, at) for value, at in pairs
        )
        return next(filter(None, each), None)
    described: bool = is_dataclass(own)  # which would narrow its type
    if not described:
        return None
    kind = type(own).__name__
    if kind not in known:
        return f"{who}, and here {name} is {kind}"
    for field in fields(own):
        value, at = getattr(own, field.name), f"{name}.{field.name}".lstrip(".")
        if field.default not in (MISSING, value) and f"{kind}.{field.name}" not in known:
            return f"{who}, and here {at} is {_shown(value)}"
        if field.name == "act" and value not in known:
            return f"{who}, and here {at} is {value!r}"
        if field.name == "rope" and value.dim != own.head_dim:
            return f"{who}, and here {at}.dim is {value.dim}"
        if (found := unlike(value, known, who, at)) is not None:
            return found
    return None


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return type(value).__name__ if is_dataclass(value) else repr(value)
