"""Texts beyond the context that a model was first trained with, where it has rotary frequencies of their own for these.

Such models (LongRoPE: Phi-3 and Phi-4-mini) have short factors for texts up to the original context, and long ones for
longer texts. A text keeps what it began with: the short ones, unless a longer context was asked for.
"""

from __future__ import annotations

import math
from typing import Any

from specdec.errors import ConfigError

__all__ = ["bound_context", "take_long_factors"]


def take_long_factors(own: dict[str, Any], asked: int | None) -> None:
    """Have a model use its long factors from the first token, where texts of ``asked`` tokens need them.

    Cosines and sines are scaled as before: by the ratio of the whole context to the original one.

    Args:
        own: settings of the model's texts, such as ``vars()`` of a config, which are changed.
        asked: tokens of the longest text; None: what the model does by itself.
    """
    ropes = own.get("rope_parameters") or {}
    for rope in [kind for kind in ropes.values() if isinstance(kind, dict)] or [ropes]:
        if rope.get("rope_type") != "longrope":
            continue
        longest = int(own["max_position_embeddings"])
        trained = int(rope.get("original_max_position_embeddings") or longest)
        if asked is None or asked <= trained:
            continue
        if rope.get("attention_factor") is None:
            ratio = float(rope.get("factor") or longest / trained)
            rope["attention_factor"] = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
        rope["short_factor"], rope["original_max_position_embeddings"] = rope["long_factor"], longest
        if "original_max_position_embeddings" in own:  # which Phi-3's class takes first
            own["original_max_position_embeddings"] = longest


def bound_context(target: Any, asked: int | None) -> None:
    """Let a target's texts have at most ``asked`` tokens.

    Raises:
        ConfigError: the model's context is shorter.
    """
    own = target.context_length
    if asked is not None and asked > own:
        raise ConfigError(f"max_model_len is {asked}, and the model's context holds {own} tokens; give at most {own}")
    target.context_length = own if asked is None else asked
