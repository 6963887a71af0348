"""Experts: the routers of transformers that are known, so that a check at load can give each row all experts."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["choose_all"]

_ROUTERS = (
    *("ExaoneMoeTopkRouter", "Glm4MoeTopkRouter", "GptOssTopKRouter", "HunYuanMoEV1Gate", "MellumTopKRouter"),
    *("GraniteMoeHybridTopKRouter", "GraniteMoeSharedTopKRouter", "GraniteMoeTopKRouter", "MixtralTopKRouter"),
    *("OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"),
)


def choose_all(root: nn.Module) -> None:
    """Let known routers in a replica choose all experts for each row."""
    modules: Any = root.modules()
    for module in modules:
        kind = type(module)
        known = kind.__name__ in _ROUTERS and kind.__module__.startswith("transformers.models.")
        if known and 1 <= module.top_k <= (count := len(next(module.parameters()))):  # a row of each expert
            module.top_k = count
