"""What the loop trains and judges: the interface of a drafter's training, and its best weights on the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from drafters.shared.weights import load_tensors, reading
from specdec.errors import ConfigError
from training.packing import Batch

__all__ = ["Trainable", "evaluated", "judged_anew", "load_weights"]


class Trainable(Protocol):
    """The interface of a drafter's training; the loop does the rest.

    Attributes:
        module: the module whose parameters with gradients are trained.
        metric: name of the figure of ``evaluate`` that chooses the best checkpoint, the largest value.
        judges: whether there is held-out data; otherwise the last checkpoint is the best.
    """

    module: nn.Module
    metric: str
    judges: bool

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss *summed* over ``batch.targets``; ``module`` is the trained module, perhaps wrapped by accelerate."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, by name."""

    def evaluation_seconds(self, clock: Callable[[], float]) -> float:
        """The expected seconds of ``evaluate``."""

    def save(self, folder: Path) -> None:
        """Write the module's weights for use."""


def load_weights(module: nn.Module, folder: Path) -> None:
    """Fill a module with the weights that a Trainable's ``save`` wrote into a folder.

    Raises:
        CheckpointError: there are none of this module.
    """
    with reading("weights", folder, "start the same command with another --out"):
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ConfigError("it holds no *.safetensors")
        module.load_state_dict(load_tensors(found[0]))


def judged_anew(trainable: Trainable, folder: Path, best: Mapping[str, float]) -> dict[str, float]:
    """The evaluation of the best checkpoint as it is judged now; the module stays as it is."""
    now = {name: value.clone() for name, value in trainable.module.state_dict().items()}
    load_weights(trainable.module, folder)
    figures = evaluated(trainable)
    trainable.module.load_state_dict(now)
    said = f"{trainable.metric} {figures[trainable.metric]:.4g}"
    print(f"best/ of step {best['step']:.0f} is judged anew, as the options of the evaluation changed: {said}")
    return {"step": best["step"], **figures}


def evaluated(trainable: Trainable) -> dict[str, float]:
    trainable.module.eval()
    figures = trainable.evaluate()
    trainable.module.train()
    return figures
