"""Packed tensors: those of a quantised checkpoint in safetensors, whatever its method.

Weights are packed into blocks a few rows at a time, when these are laid in panels or dequantised, so that neither a
dense matrix nor a second quantised one is ever held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from specdec.errors import CheckpointError
from specdec.native.formats import formats
from specdec.runners.block_weight import BlockRows, BlockTensor
from specdec.runners.memory_pages import FilePages

__all__ = ["PackedRows", "PackedTensors", "SomeRows"]

_DEQUANTISED = 1 << 20  # weights of a dense matrix at once


class PackedRows(BlockRows, Protocol):
    """A weight's blocks, packed as they are read.

    Attributes:
        format: the blocks' format, by its name; None where inputs are not whole blocks.
    """

    format: str | None

    def dense(self, first: int, last: int) -> torch.Tensor:
        """[last - first, in] float32: what these rows stand for."""

    def tensor(self) -> BlockTensor | None:
        """As a product takes them; None where inputs are not whole blocks."""
        if self.format is None:
            return None
        return BlockTensor(next(one for one in formats().values() if one.name == self.format), self)


class SomeRows(BlockRows):
    """The blocks of some outputs of a weight."""

    def __init__(self, whole: BlockRows, rows: slice) -> None:
        self._whole, self._first, self._last = whole, *rows.indices(len(whole))[:2]
        self.shape = self._last - self._first, whole.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, last, _ = rows.indices(len(self))
        return self._whole[self._first + first : self._first + last]

    def release(self) -> None:
        self._whole.release()


class PackedTensors:
    """A quantised checkpoint's tensors.

    Args:
        where: the checkpoint, as messages name it.
        files: its tensors' names -> their files, from ``opened_tensors``.

    Attributes:
        left: the names of tensors that were not read.
        architecture: what they are to fit, as messages name it.
    """

    architecture = "its architecture"

    def __init__(self, where: str, files: Mapping[str, Any]) -> None:
        self.where, self.files, self.pages = where, files, FilePages()

    def packed(self, name: str, shape: Sequence[int]) -> PackedRows | None:
        """A weight's blocks, or None where it is not quantised."""
        raise NotImplementedError

    def quantised(self) -> Mapping[str, tuple[int, ...]]:
        """The names of quantised weights, as if they were dense, and their shapes [out, in]."""
        raise NotImplementedError

    def belongs(self, name: str) -> bool:
        """Whether a tensor is part of a quantised weight."""
        raise NotImplementedError

    def described(self) -> str:
        """The kind of the quantised weights that were read, as text."""
        raise NotImplementedError

    def left_out(self) -> str:
        """What its config asks for that is not done, as the end of a text; empty where nothing is."""
        return ""

    def read(self, name: str, shape: Sequence[int] | None, *dtypes: torch.dtype, asked_by: str = "") -> torch.Tensor:
        """A tensor as it is in its file; ``asked_by``: what asks for the shape, if that is not the model."""
        if (file := self.files.get(name)) is None:
            raise self.unfit(f"1 missing, such as {name}")
        tensor: torch.Tensor = file.get_tensor(name)
        if shape is not None and tensor.shape != tuple(shape):
            raise self.misshapen(name, tensor, shape, asked_by)
        if dtypes and tensor.dtype not in dtypes:
            raise self.unfit(f"1 of another dtype, such as {name}, {str(tensor.dtype)[6:]}")
        return tensor

    def check_finite(self, name: str, scales: torch.Tensor) -> None:
        """Raises CheckpointError where a weight's scales are none."""
        if not torch.isfinite(scales).all():
            raise CheckpointError(f"{name!r} in {self.where} holds NaN or infinity; download the checkpoint anew")

    def misshapen(self, name: str, tensor: torch.Tensor, shape: Sequence[int], asked_by: str = "") -> CheckpointError:
        told = f"{list(tensor.shape)} in place of {list(shape)}{asked_by}"
        return self.unfit(f"1 misshapen, such as {name}, {told}")

    def blocks(self, name: str, shape: Sequence[int]) -> BlockTensor | None:
        """A weight [out, in] in blocks; None where it is not quantised, or its inputs are not whole blocks."""
        rows = self.packed(name, shape)
        return None if rows is None else rows.tensor()

    def dense(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor as any other checkpoint would have it, in a dtype."""
        found = torch.empty(*shape, dtype=dtype)
        rows = self.packed(name, shape)
        if rows is None:
            return found.copy_(self.read(name, shape))
        some = max(1, _DEQUANTISED // shape[1])
        for first in range(0, shape[0], some):
            last = min(first + some, shape[0])
            found[first:last] = rows.dense(first, last)
        rows.release()
        return found

    def is_no_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros, which quantised linears are saved with also where their model has none."""
        return name.endswith("_proj.bias") and not bool(self.files[name].get_tensor(name).any())

    def unfit(self, what: str) -> CheckpointError:
        """The error that tensors are not as they should be."""
        return CheckpointError(
            f"the checkpoint {self.where} does not fit {self.architecture}: tensors {what}; "
            "it was saved from another architecture or is incomplete"
        )
