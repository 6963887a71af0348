"""Features online: what a frozen target gives for a batch, computed when it is needed and never stored."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from specdec.model import TransformersTarget
from training.packing import Batch

__all__ = ["FrozenTarget"]


class FrozenTarget:
    """A target's early features and last hidden states for whole batches, by transformers' own forward.

    Args:
        target: the model; it is never changed.
        layers: for each l >= 1 of these, features are the residual stream after l layers.
    """

    def __init__(self, target: TransformersTarget, layers: Iterable[int]) -> None:
        self.target = target
        self.layers = sorted(set(layers))
        target.model.requires_grad_(False)

    def read(self, batch: Batch) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Features by layer [B, L, D], and the states [N, D] after the last norm at ``batch.targets``; no gradients."""
        features: dict[int, torch.Tensor] = {}
        hooks = [
            self.target.layers[layer - 1].register_forward_hook(partial(_keep, features, layer))
            for layer in self.layers
        ]
        try:
            with torch.no_grad():
                # Positions that start again tell transformers where a piece begins; pieces do not see each other.
                states: torch.Tensor = self.target.decoder(
                    input_ids=batch.tokens, position_ids=batch.positions, use_cache=False
                ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return features, states.flatten(0, 1)[batch.targets]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's logits [..., V] of states after a last norm."""
        return self.target.head(hidden.to(self.target.model.get_output_embeddings().weight.dtype))


def _keep(features: dict[int, torch.Tensor], layer: int, module: Any, arguments: Any, output: Any) -> None:
    """A forward hook that notes what left a layer."""
    features[layer] = output[0] if isinstance(output, tuple) else output
