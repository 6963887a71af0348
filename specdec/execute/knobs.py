"""What an executor computes of a description: the description is compared with what it would run in its place."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

__all__ = ["unlike"]


def unlike(own: Any, computed: Any, who: str, name: str = "") -> str | None:
    """The first thing in a description that is not what is computed, as a reason; None where there is none.

    ``who``: what the executor computes, as a sentence.
    """
    if own == computed:
        return None
    if type(own) is type(computed) and is_dataclass(own):
        names = [field.name for field in fields(own)]
        inner = [(one, getattr(own, one), getattr(computed, one)) for one in names]
    elif isinstance(own, tuple) and isinstance(computed, tuple):
        inner = [(str(number), *pair) for number, pair in enumerate(zip(own, computed, strict=True))]
    else:
        return f"{who}, and here {name} is {_shown(own)}"
    return next(filter(None, (unlike(one, other, who, f"{name}.{at}".lstrip(".")) for at, one, other in inner)))


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return type(value).__name__ if is_dataclass(value) else repr(value)
