"""Quantised sources: GPTQ, AWQ and bitsandbytes checkpoints, whose weights are in blocks or as if they were dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specdec.decoder.weights.bitsandbytes import BitsAndBytesTensors
from specdec.decoder.weights.int4 import Int4Tensors
from specdec.decoder.weights.int4_settings import Int4Settings
from specdec.decoder.weights.packed import PackedTensors
from specdec.decoder.weights.safetensors import FLOATS, dtype_name, opened_tensors
from specdec.runners.block_weight import BlockTensor

__all__ = ["METHODS", "Method", "QuantisedSource", "method_of", "quantised_source"]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of quantisation.

    Attributes:
        packages: with which transformers loads its checkpoints.
        marks: parts of names, one of which each quantised weight has a tensor of.
    """

    packages: tuple[str, ...]
    marks: tuple[str, ...]

    def transformers_loads(self) -> bool:
        """Whether these packages are here."""
        return all(find_spec(name) is not None for name in self.packages)


METHODS: Mapping[str, Method] = {
    "gptq": Method(("gptqmodel", "optimum"), (".qweight",)),
    "awq": Method(("gptqmodel",), (".qweight",)),
    "bitsandbytes": Method(("bitsandbytes",), (".quant_state.", ".SCB")),
}
"""Those that are read here, by their names in configs."""


def method_of(told: Any) -> str | None:
    """The method that a config's ``quantization_config`` names, or None where it is none of these."""
    if not isinstance(told, Mapping):
        return None
    method = told.get("quant_method")
    if method is None and (told.get("load_in_4bit") or told.get("load_in_8bit")):  # as transformers takes it
        return "bitsandbytes"
    return method if isinstance(method, str) and method in METHODS else None


def quantised_source(folder: Path, told: Any, architecture: str, *, int8: bool = False) -> QuantisedSource:
    """A folder's tensors by what its config says of their quantisation, which is one of ``METHODS``.

    Args:
        told: the ``quantization_config``.
        architecture: what they are to fit, as messages name it.
        int8: rows that blocks are multiplied with are to be rounded to bytes.

    Raises:
        CheckpointError: weights of another number of bits, or in another layout; or files that are missing or broken.
        ConfigError: blocks of no integers, whose rows cannot be rounded.
    """
    where, settings = repr(str(folder)), Int4Settings.of(told, repr(str(folder)))
    files = opened_tensors(folder)
    tensors: PackedTensors
    if settings is None:
        tensors = BitsAndBytesTensors(where, files, int8)
    else:
        tensors = Int4Tensors(settings, where, files)
    tensors.architecture = architecture
    return QuantisedSource(tensors)


class QuantisedSource:
    """As of :class:`specdec.decoder.weights.source.Source`; ``tensors``: what the checkpoint has.

    Attributes:
        quantised: the quantised weights, and their shapes as if they were dense.
    """

    biases_lack = False

    def __init__(self, tensors: PackedTensors) -> None:
        self.where, self._tensors, self.quantised = tensors.where, tensors, tensors.quantised()
        own = {name: file for name, file in tensors.files.items() if not tensors.belongs(name)}
        headers = {name: file.get_slice(name) for name, file in own.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **{name: tuple(header.get_shape()) for name, header in headers.items()},
            **self.quantised,
        }
        self.strange: Mapping[str, str] = {
            name: dtype_name(dtype) for name, header in headers.items() if (dtype := header.get_dtype()) not in FLOATS
        }

    def described(self) -> str:
        """The kind of the quantised weights that were read, as text."""
        return self._tensors.described()

    def read(self, name: str) -> torch.Tensor:
        if name in self.quantised:
            return self._tensors.dense(name, self.shapes[name], torch.float32)
        return self._tensors.read(name, None)

    def blocks(self, name: str) -> BlockTensor | None:
        return self._tensors.blocks(name, self.shapes[name]) if name in self.quantised else None

    def is_no_bias(self, name: str) -> bool:
        return self._tensors.is_no_bias(name)

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors.pages.release(tensors)
