"""LayerRunner: the code that runs a model's layers, from tokens to logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

import torch

from specdec.block import Rows
from specdec.rotary import Angles

__all__ = ["Layer", "LayerRunner"]

Layer = Callable[[torch.Tensor, Rows, Angles], torch.Tensor]
"""[T, D] of a block's rows through one layer, at these rotary positions."""


class LayerRunner(ABC):
    """One way to compute what a model does.

    What a row sees, and where its keys and values go, is the block's affair: a runner asks the block and knows no
    sequence of its own, so that a block may hold rows of several.

    Attributes:
        name: as in ``execution=``.
        borrows: whether it calls the model's own attention modules, which then have to be lent specdec's attention.
        alike: whether a row's numbers are the same, bit for bit, whatever rows are beside it.
        embed: [1, T] tokens to [1, T, D].
        norm: the last norm, [..., D].
        head: [..., D] that passed the last norm to logits [..., V], before any soft cap.
    """

    name: str
    borrows: bool = False
    alike: bool = False
    embed: Callable[[torch.Tensor], Any]
    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]

    @abstractmethod
    def run(
        self, hidden: torch.Tensor, block: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """[T, D] through layers [first, last), and what goes into the layers that ``taps`` names, below ``last``."""

    def graphs(self, backend: str) -> str:
        """How steps are replayed as CUDA graphs with such attention, or why they are not."""
        return f"not used: {self.name} layers are not all Llama-like layers that Triton's kernels run on one device"

    def changed(self) -> str | None:
        """What was changed in the model since the runner read it and would not be followed; None if nothing was."""
        return None
