"""Experts: the routers of transformers that are known, so that a check at load can give each row all experts."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

__all__ = ["choose_all"]

_ROUTERS = (MixtralTopKRouter, OlmoeTopKRouter, Qwen3MoeTopKRouter)  # softmax of a logit for each, then the likeliest


def choose_all(root: nn.Module) -> None:
    """Let known routers in a replica choose all experts for each row."""
    modules: Any = root.modules()
    for module in modules:
        if type(module) in _ROUTERS and 1 <= module.top_k <= len(module.weight):
            module.top_k = len(module.weight)
