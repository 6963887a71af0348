"""Quantised checkpoints in safetensors as models of transformers, whose weights native layers hold in blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from specdec.decoder.weights.packed import PackedTensors
from specdec.errors import CheckpointError
from specdec.models.gguf_blocks import Filling
from specdec.runners.block_weight import BlockTensor

__all__ = ["PackedFilling"]


class PackedFilling(Filling):
    """A model while it is filled with a quantised checkpoint's weights.

    Args:
        tensors: of the checkpoint.
        folder: of the checkpoint.
        in_blocks: weights stay in blocks where they can; otherwise they are dequantised.

    The rest as of ``Filling``.
    """

    def __init__(
        self, tensors: PackedTensors, folder: Path, config: Any, dtype: torch.dtype, in_blocks: bool, int8: bool
    ) -> None:
        super().__init__(config, dtype, int8, tensors.where)
        self._in_blocks, self.tensors = in_blocks, tensors
        tensors.architecture = type(self.model).__name__
        self.fill()
        self._check_left()
        if (folder / "generation_config.json").exists():
            self.model.generation_config = GenerationConfig.from_pretrained(folder)
        self.model.name_or_path = str(folder)
        vars(self.model.config).pop("quantization_config", None)  # a copy of the model, or of its config, has none

    def _tensor(self, name: str, shape: Sequence[int]) -> BlockTensor | None:
        return self.tensors.blocks(name, shape) if self._in_blocks else None

    def _dense(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return self.tensors.dense(name, shape, self._dtype)

    def _unfit(self, what: str) -> CheckpointError:
        return self.tensors.unfit(what)

    def _check_left(self) -> None:
        """Raises CheckpointError for tensors that the model has no place for."""
        model: Any = self.model
        ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
        extra = [
            name
            for name in sorted(self.tensors.left)
            if not any(re.search(pattern, name) for pattern in ignored)
            and not self.tensors.is_no_bias(name)
            and not self._is_tied(name)
        ]
        if extra:
            raise self._unfit(f"{len(extra)} extra, such as {extra[0]}")

    def _is_tied(self, name: str) -> bool:
        """Whether it is the head's weight once more, of a model whose head has the embedding's."""
        model: Any = self.model
        head, embedding = (
            f"{self._names[id(module)]}.weight"
            for module in (model.get_output_embeddings(), model.get_input_embeddings())
        )
        if name != head or not self._config.tie_word_embeddings:
            return False
        files = self.tensors.files
        return torch.equal(files[name].get_tensor(name), files[embedding].get_tensor(embedding))
