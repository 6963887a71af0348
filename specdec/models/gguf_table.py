"""The table of tensors in a GGUF file, or in the parts of one, checked against the files before a tensor is read."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import CheckpointError, first_line
from specdec.models.gguf_kinds import refuse_head
from specdec.models.gguf_parts import check_part, check_tensor_count, parts_of
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
        offset, size: offset from the file's first tensor, and size, in bytes.
        part: number of the file that holds it, from 0.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    size: int
    part: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it holds floats, and no blocks."""
        return self.type in _PLAIN


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
    """Values and bytes of a block of ggml's type ``kind``; raises CheckpointError where these are not known."""
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
    if kind not in [*gguf.GGMLQuantizationType]:
        raise CheckpointError(
            f"it holds tensors of type {kind}, which the installed package gguf does not know: install a newer one, or "
            "get the file again, or another quantisation"
        )
    found: tuple[int, int] = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    return found


class _File:
    """One GGUF file: its bytes, its settings and the tensors that it holds.

    Attributes:
        start, data: where the table of tensors and the first tensor begin.
        end: size in bytes that the file must have at least.

    Raises:
        ValueError: an entry is not valid; the message names it.
        CheckpointError: a tensor's type is retired, or not known.
    """

    def __init__(self, path: Path, part: int) -> None:
        from transformers.integrations.gguf.reader import _read_tensor_table

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
            self.entries.append(TensorEntry(name, shape, kind, offset, math.prod(shape) // values * size, part))
        self._check_places()
        self.end = self.data + max((entry.offset + entry.size for entry in self.entries), default=0)

    @classmethod
    def read(cls, path: Path, part: int = 0) -> _File:
        """The file.

        Raises:
            CheckpointError: it is not GGUF, or is broken or incomplete.
        """
        refuse_head(path)
        remedy = "it is broken or was not fetched whole; get it again"
        try:
            file = cls(path, part)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
        except Exception as error:  # a broken file's lengths can make the reader raise anything
            why = first_line(error).rstrip(".")
            raise CheckpointError(f"cannot read {str(path)!r} as GGUF: {why}; {remedy}") from error
        if (size := path.stat().st_size) < file.end:
            raise CheckpointError(f"{str(path)!r} ends after {size} of {file.end} bytes; {remedy}")
        return file

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


class TensorTable:
    """The tensors of a file; where it is one part of a split model, those of all parts, none of which is copied.

    Attributes:
        paths: the files, of which the first has the settings.

    Raises:
        CheckpointError: a file is not GGUF, or is broken or incomplete; or parts are missing or of other models.
    """

    def __init__(self, path: Path) -> None:
        given = _File.read(path)
        self.paths = parts_of(path, given.metadata)
        self.files = [given] if len(self.paths) == 1 else [_File.read(one, at) for at, one in enumerate(self.paths)]
        self.where, self.metadata = repr(str(self.paths[0])), self.files[0].metadata
        self.entries = [entry for file in self.files for entry in file.entries]
        if len(self.paths) > 1:
            self._check_parts()

    @property
    def architecture(self) -> str:
        """Llama.cpp's name of it; raises CheckpointError where the file has none."""
        if (found := self.metadata.get("general.architecture")) is None:
            raise CheckpointError(f"{self.where} says no general.architecture; it is no model, or broken: get it again")
        return str(found)

    def of(self, entries: Sequence[TensorEntry]) -> TensorTable:
        """The same files, with these of their tensors, perhaps by other names."""
        found = copy.copy(self)
        found.entries = [*entries]
        return found

    def _check_parts(self) -> None:
        """Raises CheckpointError where the files are not the parts of one model."""
        for at, (path, file) in enumerate(zip(self.paths, self.files, strict=True)):
            check_part(path, at, len(self.files), file.metadata, self.metadata)
        places: dict[str, int] = {}
        for entry in self.entries:
            if (other := places.setdefault(entry.name, entry.part)) != entry.part:
                raise CheckpointError(
                    f"{str(self.paths[other])!r} and {str(self.paths[entry.part])!r} both hold the tensor "
                    f"{entry.name!r}: they are not parts of one model; get all parts again, from one place"
                )
        check_tensor_count(self.paths, self.metadata, len(self.entries))

    def bytes_of(self, entry: TensorEntry) -> np.ndarray:
        """The bytes of a tensor, memory-mapped."""
        file = self.files[entry.part]
        begin = file.data + entry.offset
        return file.blob[begin : begin + entry.size]

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
