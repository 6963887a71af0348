"""LayerRunner: the code that runs a model's layers, from tokens to logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from specdec.block import Rows
from specdec.joints import Joints
from specdec.rotary import Angles
from specdec.sampling import Peaks

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

    def end(
        self, hidden: torch.Tensor, block: Rows, rows: Sequence[int] | None, joints: Joints, final: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Peaks | None]:
        """What the last norm and the head make of [T, D] that passed all layers.

        Returns:
            All rows after the norm, if they are ``final``ly wanted; logits of the ``rows`` (None for all), and their
            peaks where these were found on the way; None for what is not there.
        """
        normed = self.norm(hidden) if final else None
        if rows is not None and not rows:
            return normed, None, None
        chosen = hidden if normed is None else normed
        if rows is not None:
            chosen = chosen.index_select(0, block.index(rows, chosen.device))
        chosen = self.norm(chosen) if normed is None else chosen
        return normed, joints.logits(self.head(joints.hidden(chosen))), None

    def graphs(self, backend: str) -> str:
        """How steps are replayed as CUDA graphs with such attention, or why they are not."""
        return f"not used: {self.name} layers are not all Llama-like layers that Triton's kernels run on one device"

    def changed(self) -> str | None:
        """What was changed in the model since the runner read it and would not be followed; None if nothing was."""
        return None
