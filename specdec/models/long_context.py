"""Texts beyond the context that a model was first trained with, where it has rotary frequencies of their own for these.

Such models (LongRoPE: Phi-3 and Phi-4-mini) have short factors for texts up to the original context, and long ones for
longer texts. A text keeps what it began with: the short ones, unless a longer context was asked for.
"""

from __future__ import annotations

import math
from typing import Any

from specdec.decoder.rope_settings import rope_kinds
from specdec.errors import ConfigError

__all__ = ["bound_context", "take_long_factors"]


def take_long_factors(config: Any, asked: int | None) -> None:
    """Have the model of a config use its long factors from the first token, where texts of ``asked`` tokens need them.

    Cosines and sines are scaled as before: by the ratio of the whole context to the original one.
    """
    text = config.get_text_config()
    longest = int(text.max_position_embeddings)
    kinds: Any = rope_kinds(text)
    for rope in kinds:
        if rope.get("rope_type") != "longrope":
            continue
        trained = int(rope.get("original_max_position_embeddings") or longest)
        if asked is None or asked <= trained:
            continue
        if rope.get("attention_factor") is None:
            ratio = float(rope.get("factor") or longest / trained)
            rope["attention_factor"] = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
        rope["short_factor"], rope["original_max_position_embeddings"] = rope["long_factor"], longest
        if hasattr(text, "original_max_position_embeddings"):  # which Phi-3's class takes first
            text.original_max_position_embeddings = longest


def bound_context(target: Any, asked: int | None) -> None:
    """Let a target's texts have at most ``asked`` tokens.

    Raises:
        ConfigError: the model's context is shorter.
    """
    own = target.context_length
    if asked is not None and asked > own:
        raise ConfigError(f"max_model_len is {asked}, and the model's context holds {own} tokens; give at most {own}")
    target.context_length = own if asked is None else asked
