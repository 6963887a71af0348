"""Quantised sources: checkpoints of each method that is read, whose weights are in blocks or as if they were dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specdec.decoder.weights.bitsandbytes import BitsAndBytesTensors
from specdec.decoder.weights.compressed import CompressedTensors
from specdec.decoder.weights.compressed_settings import CompressedSettings
from specdec.decoder.weights.int4 import Int4Tensors
from specdec.decoder.weights.int4_settings import Int4Settings
from specdec.decoder.weights.mxfp4 import Mxfp4Tensors
from specdec.decoder.weights.packed import PackedTensors
from specdec.decoder.weights.safetensors import FLOATS, dtype_name, opened_tensors
from specdec.runners.block_weight import BlockTensor

__all__ = ["METHODS", "Method", "QuantisedSource", "method_of", "needs_gpu", "quantised_source"]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of quantisation.

    Attributes:
        packages: with which transformers loads its checkpoints.
        marks: parts of names, one of which each quantised weight has a tensor of.
        here: weights that are read here are never left to transformers, and on a CPU no others are: its modules round
            rows as well, or dequantise.
    """

    packages: tuple[str, ...]
    marks: tuple[str, ...]
    here: bool = False

    def transformers_loads(self) -> bool:
        """Whether these packages are here."""
        return all(find_spec(name) is not None for name in self.packages)

    def leaves(self, device: Any) -> bool:
        """Whether transformers is left what is not read here, to run on a device."""
        return self.transformers_loads() and not (self.here and _is_cpu(device))


METHODS: Mapping[str, Method] = {
    "gptq": Method(("gptqmodel", "optimum"), (".qweight",)),
    "awq": Method(("gptqmodel",), (".qweight",)),
    "bitsandbytes": Method(("bitsandbytes",), (".quant_state.", ".SCB")),
    "compressed-tensors": Method(("compressed_tensors",), (".weight_packed", ".weight_scale"), here=True),
    "mxfp4": Method((), ("_blocks",), here=True),
}
"""Those that are read here, by their names in configs."""
_GPU_METHODS = ("torchao", "hqq")


def needs_gpu(method: object, device: Any) -> bool:
    """Whether a method's modules are refused on this device, a CPU, as nothing of theirs was tried there."""
    return method in _GPU_METHODS and _is_cpu(device)


def _is_cpu(device: Any) -> bool:
    return torch.device("cpu" if device is None else device).type == "cpu"


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
    where, method = repr(str(folder)), method_of(told)
    tensors: PackedTensors
    if method == "compressed-tensors":
        tensors = CompressedTensors(CompressedSettings.of(told, where), where, opened_tensors(folder))
    elif method == "mxfp4":
        tensors = Mxfp4Tensors(where, opened_tensors(folder))
    elif (settings := Int4Settings.of(told, where)) is not None:
        tensors = Int4Tensors(settings, where, opened_tensors(folder))
    else:
        tensors = BitsAndBytesTensors(where, opened_tensors(folder), int8)
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

    def left_out(self) -> str:
        """What its config asks for that is not done, as the end of a text; empty where nothing is."""
        return self._tensors.left_out()

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
