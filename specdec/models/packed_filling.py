"""Quantised checkpoints in safetensors: what those of all methods have in common.

Their weights are packed into blocks a few rows at a time, when these are laid in panels or dequantised, so that neither
a dense matrix nor a second quantised one is ever held.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from specdec.errors import CheckpointError
from specdec.models.gguf_blocks import Filling
from specdec.native.formats import formats
from specdec.runners.block_weight import BlockRows, BlockTensor
from specdec.runners.memory_pages import FilePages

__all__ = ["PackedFilling", "PackedRows"]

_DEQUANTISED = 1 << 20  # weights of a dense matrix at once


class PackedRows(BlockRows, Protocol):
    """A weight's blocks, packed as they are read.

    Attributes:
        format: the blocks' format, by its name; None where inputs are not whole blocks.
    """

    format: str | None

    def dense(self, first: int, last: int) -> torch.Tensor:
        """[last - first, in] float32: what these rows stand for."""


class PackedFilling(Filling):
    """A model while it is filled with a quantised checkpoint's weights.

    Args:
        folder: of the checkpoint.
        files: its tensors' names -> their files, from ``opened_tensors``.
        in_blocks: weights stay in blocks where they can; otherwise they are dequantised.

    The rest as of ``Filling``.
    """

    def __init__(
        self, folder: Path, files: Mapping[str, Any], config: Any, dtype: torch.dtype, in_blocks: bool, int8: bool
    ) -> None:
        super().__init__(config, dtype, int8, repr(str(folder)))
        self._in_blocks, self._files = in_blocks, files
        self._pages = FilePages()
        self._left = {*self._files}
        self.fill()
        self._check_left()
        if (folder / "generation_config.json").exists():
            self.model.generation_config = GenerationConfig.from_pretrained(folder)
        self.model.name_or_path = str(folder)
        vars(self.model.config).pop("quantization_config", None)  # a copy of the model, or of its config, has none

    def _packed(self, name: str, shape: Sequence[int]) -> PackedRows | None:
        """A weight's blocks, or None where it is not quantised."""
        raise NotImplementedError

    def described(self) -> str:
        """The kind of its quantised weights, as text."""
        raise NotImplementedError

    def _read(self, name: str, shape: Sequence[int] | None, *dtypes: torch.dtype, asked_by: str = "") -> torch.Tensor:
        """A tensor as it is in its file; ``asked_by``: what asks for the shape, if that is not the model."""
        if (file := self._files.get(name)) is None:
            raise self._unfit(f"1 missing, such as {name}")
        tensor: torch.Tensor = file.get_tensor(name)
        if shape is not None and tensor.shape != tuple(shape):
            raise self._misshapen(name, tensor, shape, asked_by)
        if dtypes and tensor.dtype not in dtypes:
            raise self._unfit(f"1 of another dtype, such as {name}, {str(tensor.dtype)[6:]}")
        self._left.discard(name)
        return tensor

    def _misshapen(self, name: str, tensor: torch.Tensor, shape: Sequence[int], asked_by: str = "") -> CheckpointError:
        told = f"{list(tensor.shape)} in place of {list(shape)}{asked_by}"
        return self._unfit(f"1 misshapen, such as {name}, {told}")

    def _tensor(self, name: str, shape: Sequence[int]) -> BlockTensor | None:
        if not self._in_blocks or (rows := self._packed(name, shape)) is None or rows.format is None:
            return None
        return BlockTensor(next(one for one in formats().values() if one.name == rows.format), rows)

    def _dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        found = torch.empty(*shape, dtype=self._dtype)
        rows = self._packed(name, shape)
        if rows is None:
            tensor = self._read(name, shape)
            if not tensor.is_floating_point():
                raise self._unfit(f"1 of another dtype, such as {name}, {str(tensor.dtype)[6:]}")
            return found.copy_(tensor)
        some = max(1, _DEQUANTISED // shape[1])
        for first in range(0, shape[0], some):
            last = min(first + some, shape[0])
            found[first:last] = rows.dense(first, last)
        rows.release()
        return found

    def _check_left(self) -> None:
        """Raises CheckpointError for tensors that the model has no place for."""
        model: Any = self.model
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        extra = [
            name
            for name in sorted(self._left)
            if not any(re.search(pattern, name) for pattern in ignored)
            and not self._is_no_bias(name)
            and not self._is_tied(name)
        ]
        if extra:
            raise self._unfit(f"{len(extra)} extra, such as {extra[0]}")

    def _is_no_bias(self, name: str) -> bool:
        """Whether it is a bias of zeros, which quantised linears are saved with also where their model has none."""
        return name.endswith("_proj.bias") and not bool(self._files[name].get_tensor(name).any())

    def _is_tied(self, name: str) -> bool:
        """Whether it is the head's weight once more, of a model whose head has the embedding's."""
        model: Any = self.model
        head, embedding = (
            f"{self._names[id(module)]}.weight"
            for module in (model.get_output_embeddings(), model.get_input_embeddings())
        )
        if name != head or not self._config.tie_word_embeddings:
            return False
        return torch.equal(self._files[name].get_tensor(name), self._files[embedding].get_tensor(embedding))
