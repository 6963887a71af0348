"""Source: where a decoder's tensors come from, by the names that they have there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from specdec.runners.block_weight import BlockTensor

__all__ = ["DenseSource", "Source", "TensorSource"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Source(Protocol):
    """Named tensors, of which nothing is in memory before it is read.

    Attributes:
        where: as messages name it.
        shapes: of all tensors.
        strange: the dtypes of those that are no plain floats.
        biases_lack: a bias that is not there is zeros.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    strange: Mapping[str, str]
    biases_lack: bool

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is there; it may be a view of a file's pages, and is not to be written to."""

    def blocks(self, name: str) -> BlockTensor | None:
        """A weight in quantised blocks; None where it is in none."""

    def is_no_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros, which quantised linears are saved with also where their model has none."""

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Drop what these tensors hold in memory, as they were copied; a later look at them would read it again."""


class DenseSource:
    """What sources have in common whose weights are not quantised."""

    biases_lack = False

    def blocks(self, name: str) -> BlockTensor | None:
        """Of no tensor."""

    def is_no_bias(self, name: str) -> bool:
        """Of no tensor."""
        return False


class TensorSource(DenseSource):
    """Tensors that are in memory, such as a live model's ``state_dict()``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        self.where, self._tensors = where, tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        strange = {name: str(one.dtype)[6:] for name, one in tensors.items() if one.dtype not in _FLOATS}
        self.strange: Mapping[str, str] = strange

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach().clone()  # whoever has them may change them

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing: the copies go with their last user."""
