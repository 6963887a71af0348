"""The table of tensors in a GGUF file, checked against the file before a tensor is read."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.integrations.gguf.dequant import GGML_NAME

from specdec.errors import CheckpointError
from specdec.native.formats import formats

__all__ = ["TensorEntry", "TensorTable", "read_settings"]

_PLAIN = {0: 4, 1: 2, 30: 2}  # ggml's numbers of float32, float16 and bfloat16 -> bytes of a value
_RETIRED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_RETIRED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The type, shape and place of a tensor.

    Attributes:
        shape: shape in torch's order.
        type: ggml's number of the type.
        offset, size: offset from the first tensor, and size, in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    size: int


def read_settings(path: Path, lists: Sequence[str] = ()) -> tuple[np.ndarray, Mapping[str, Any], int, int]:
    """A file's bytes, memory-mapped; its settings; the number of its tensors; and the offset of their table.

    A list of words is given as its length, except for the keys in ``lists``, which are read.
    """
    from transformers.integrations.gguf.reader import _read_metadata  # gguf's own GGUFReader takes 5 s

    blob = np.memmap(path, mode="r", dtype=np.uint8)
    view: Any = blob.data
    # Slicing words from a memoryview is thirty times as fast as from an array, and there are up to 300,000 words.
    return blob, *_read_metadata(view, str(path), lists)


def _size_of(kind: int) -> tuple[int, int]:
    """Values and bytes of a block of ggml's type ``kind``; raises ValueError for an unknown type."""
    if kind in _PLAIN:
        return 1, _PLAIN[kind]
    if (known := formats().get(kind)) is not None:
        return int(known.values), int(known.bytes)
    import gguf  # imported late: it can import other tokenizer packages, for seconds

    if kind in _RETIRED:
        raise CheckpointError(
            f"it holds tensors of type {_RETIRED[kind]} ({kind}), which llama.cpp has retired and no program reads any "
            "more; get another quantisation, such as Q4_0"
        )
    found: tuple[int, int] = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return found


class TensorTable:
    """The tensors of a file.

    Attributes:
        end: size in bytes that the file must have at least.
        strange: types that transformers does not dequantise.

    Raises:
        ValueError: an entry is not valid; the message names it.
        CheckpointError: a tensor's type is retired.
    """

    def __init__(self, path: Path) -> None:
        from transformers.integrations.gguf.reader import _read_tensor_table

        self.where = repr(str(path))
        self.blob, self.metadata, count, self.start = read_settings(path)
        view: Any = self.blob.data
        listed, end = _read_tensor_table(view, count, self.start)
        self._alignment = int(self.metadata.get("general.alignment", 32))
        if self._alignment < 1 or self._alignment % 8:
            raise ValueError(f"its tensors are said to be aligned to {self._alignment} bytes")
        self.data = end + self.missing(end)
        self.entries: list[TensorEntry] = []
        for name, shape, kind, offset in listed:
            values, size = _size_of(kind)
            if not shape or min(shape) < 1 or shape[-1] % values:
                raise ValueError(f"tensor {name!r} is {list(shape)}, in blocks of {values}")
            if offset % self._alignment:
                raise ValueError(f"tensor {name!r} begins at byte {offset}, and alignment is {self._alignment}")
            self.entries.append(TensorEntry(name, shape, kind, offset, math.prod(shape) // values * size))
        self._check_places()
        self.end = self.data + max((entry.offset + entry.size for entry in self.entries), default=0)
        self.strange = {entry.type for entry in self.entries} - {*GGML_NAME, *_PLAIN}

    def _check_places(self) -> None:
        """Raises ValueError where two tensors have one name or share bytes."""
        names, last = set[str](), None
        for entry in sorted(self.entries, key=lambda entry: entry.offset):
            if entry.name in names:
                raise ValueError(f"it has two tensors {entry.name!r}")
            if last is not None and last.offset + last.size > entry.offset:
                raise ValueError(f"tensors {last.name!r} and {entry.name!r} share bytes")
            names.add(entry.name)
            last = entry

    def missing(self, size: int) -> int:
        """Bytes from ``size`` to the next aligned offset."""
        return -size % self._alignment

    def bytes_of(self, entry: TensorEntry) -> np.ndarray:
        """The bytes of a tensor, memory-mapped."""
        begin = self.data + entry.offset
        return self.blob[begin : begin + entry.size]

    def rows(self, entry: TensorEntry) -> np.ndarray:
        """[rows, bytes of a row] the bytes of a tensor, memory-mapped."""
        return self.bytes_of(entry).reshape(math.prod(entry.shape[:-1]), -1)

    def dequantised(self, entry: TensorEntry) -> np.ndarray:
        """The values of a tensor in float32.

        Raises:
            CheckpointError: the package gguf cannot dequantise its blocks.
        """
        import gguf

        kind = gguf.GGMLQuantizationType(entry.type)
        try:
            found: np.ndarray = gguf.quants.dequantize(self.bytes_of(entry), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.where} holds blocks of {kind.name}, which cannot be dequantised here; give another "
                "quantisation, or the model's folder of safetensors"
            ) from error
        return found.astype(np.float32, copy=False).reshape(entry.shape)

    def widen(self, copy: Path) -> None:
        """Write a copy of the file in which tensors that transformers does not dequantise are float32.

        Raises:
            CheckpointError: the package gguf cannot dequantise a block either.
        """
        table, offset = bytearray(), 0
        for entry in self.entries:
            strange, name = entry.type in self.strange, entry.name.encode()
            shape, kind = entry.shape, 0 if strange else entry.type
            table += struct.pack("<Q", len(name)) + name
            table += struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
            offset += 4 * math.prod(shape) if strange else entry.size
            offset += self.missing(offset)
        with copy.open("wb") as file:
            file.write(self.blob[: self.start].data)
            file.write(table)
            for entry in self.entries:
                file.write(bytes(self.missing(file.tell())))
                values = self.dequantised(entry) if entry.type in self.strange else self.bytes_of(entry)
                file.write(values.data)
