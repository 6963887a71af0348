"""Quantised sources: GPTQ, AWQ and bitsandbytes checkpoints, whose weights are in blocks or as if they were dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.decoder.weights.bitsandbytes import BitsAndBytesTensors
from specdec.decoder.weights.int4 import Int4Tensors
from specdec.decoder.weights.int4_settings import Int4Settings
from specdec.decoder.weights.packed import PackedTensors
from specdec.decoder.weights.safetensors import FLOATS, SafetensorsSource, opened_tensors
from specdec.decoder.weights.source import Source
from specdec.errors import CheckpointError, shown
from specdec.runners.block_weight import BlockTensor

__all__ = ["QuantisedSource", "opened_source"]


def opened_source(folder: Path, told: Any, *, int8: bool = False) -> Source:
    """A folder's tensors by what its config says of their quantisation; None where they are not quantised.

    ``int8``: rows that blocks are multiplied with are to be rounded to bytes.

    Raises:
        CheckpointError: a method that is not read here, or files that are missing or broken.
        ConfigError: blocks of no integers, whose rows cannot be rounded.
    """
    if told is None:
        return SafetensorsSource(folder)
    where, files = repr(str(folder)), opened_tensors(folder)
    settings = Int4Settings.of(told, where)
    if settings is not None:
        return QuantisedSource(Int4Tensors(settings, where, files))
    method = told.get("quant_method") if isinstance(told, Mapping) else told
    if method != "bitsandbytes":
        raise CheckpointError(f"{where} is quantised by {shown(method)}, and read are gptq, awq and bitsandbytes")
    return QuantisedSource(BitsAndBytesTensors(where, files, int8))


class QuantisedSource:
    """As of :class:`specdec.decoder.weights.source.Source`; ``tensors``: what the checkpoint has."""

    def __init__(self, tensors: PackedTensors) -> None:
        self.where, self._tensors, self._quantised = tensors.where, tensors, tensors.quantised()
        own = {name: file for name, file in tensors.files.items() if not tensors.belongs(name)}
        headers = {name: file.get_slice(name) for name, file in own.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{name: tuple(header.get_shape()) for name, header in headers.items()},
            **self._quantised,
        }
        self.strange: Mapping[str, str] = {
            name: dtype for name, header in headers.items() if (dtype := header.get_dtype()) not in FLOATS
        }

    def read(self, name: str) -> torch.Tensor:
        if name in self._quantised:
            return self._tensors.dense(name, self.shapes[name], torch.float32)
        return self._tensors.read(name, None)

    def blocks(self, name: str) -> BlockTensor | None:
        return self._tensors.blocks(name, self.shapes[name]) if name in self._quantised else None

    def is_no_bias(self, name: str) -> bool:
        return self._tensors.is_no_bias(name)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors.pages.release(tensors)
