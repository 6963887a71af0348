"""What the sections of ``gpu_check.py`` share: shapes of models, and of trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import LlamaConfig

from specdec.bench.shapes import SHAPES

__all__ = ["HALF", "SHAPES", "Figures", "Part", "named", "product_shapes", "tree_parents"]

SHAPES.setdefault(
    "smollm2",
    LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=None,
    ),
)  # fmt: skip
HALF = (torch.bfloat16, torch.float16)

Figures = Mapping[str, Any]
Part = tuple[str, Callable[[], Figures]]
"""A part's name, and what computes its figures."""


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tree_parents(rows: int, kind: str) -> list[int]:
    """A chain, a star, or a binary tree."""
    if kind == "chain":
        return list(range(-1, rows - 1))
    return [-1, *((0 if kind == "star" else (row - 1) // 2) for row in range(1, rows))]


def product_shapes(shape: str) -> dict[str, tuple[int, int, bool]]:
    """Outputs, inputs and whether gated, of a layer's products and the head."""
    config: Any = SHAPES[shape]
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return {
        "qkv": (heads * head, width, False), "out": (width, config.num_attention_heads * head, False),
        "gate_up": (inner, width, True), "down": (width, inner, False), "head": (config.vocab_size, width, False),
    }  # fmt: skip
