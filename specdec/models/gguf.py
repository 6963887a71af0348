"""GGUF: models in llama.cpp's files, which transformers dequantises, and the tokenizers that such files describe.

In memory such a model is as large as one from safetensors: two bytes a parameter in bfloat16, four in float32, however
few bits the file has. Rounding to bfloat16 is far finer than the quantisation that came before it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.gguf.dequant import GGML_NAME
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from specdec.errors import CheckpointError, ConfigError, first_line, pip_line
from specdec.models.gguf_tokenizer import TokenizerSettings, read_tokenizer

__all__ = ["GgufFile", "is_gguf", "require_gguf"]

_PLAIN = (0, 1, 30)  # ggml's numbers of float32, float16 and bfloat16


def is_gguf(place: str | Path) -> bool:
    """Whether a model's place is a GGUF file."""
    return Path(place).suffix.lower() == ".gguf"


def require_gguf() -> None:
    """Raises ConfigError where the package that reads GGUF weights is not installed."""
    if find_spec("gguf") is None:
        raise ConfigError(f"GGUF files are read by the package gguf, which is not installed: {pip_line('gguf')}")


@dataclass(frozen=True)
class GgufFile:
    """A file that is whole: its metadata by llama.cpp's keys, and the names of its tensors.

    Attributes:
        dtype: of the weights, bfloat16 where they are quantised.
        table: of a file with blocks that transformers does not dequantise; see :meth:`opened`.
    """

    path: Path
    metadata: Mapping[str, Any]
    names: tuple[str, ...]
    dtype: torch.dtype
    table: _Table | None = None

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read all but the weights.

        Raises:
            ConfigError: there is no package to read the weights with.
            CheckpointError: it is no GGUF file, or a broken or unfinished one.
        """
        require_gguf()
        remedy = "it is broken or was not fetched whole; get it again"
        try:
            metadata, names = read_gguf_metadata(str(path))
            table = None
            try:
                header = GgufHeader.from_file(str(path))
            except ValueError:
                table = _Table(path)
                if not table.strange:
                    raise
                needed, dtype = table.end, torch.bfloat16
            else:
                needed = header.data_start + max(one.offset + one.nbytes for one in header.tensors)
                dtype = header.dtype or torch.bfloat16
        except Exception as error:  # the reader goes by the lengths in the file, and a broken one may raise anything
            why = first_line(error).rstrip(".")
            raise CheckpointError(f"cannot read {str(path)!r} as GGUF: {why}; {remedy}") from error
        if (size := path.stat().st_size) < needed:
            raise CheckpointError(f"{str(path)!r} ends after {size} of {needed} bytes; {remedy}")
        return cls(path, metadata, names, dtype, table)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """A file that transformers reads: this one, or while it is wanted a copy, with tensors in float32 that
        transformers does not dequantise, such as Q5_0's, which 4-bit files have where rows are no multiple of 256.

        Raises:
            CheckpointError: blocks that the package gguf cannot dequantise either.
            OSError: no room for the copy.
        """
        if self.table is None:
            yield self.path
            return
        with TemporaryDirectory(prefix="specdec-") as folder:
            copy = Path(folder, self.path.name)
            self.table.widen(copy)
            yield copy

    @property
    def scales_positions(self) -> bool:
        """Whether its rotary frequencies are scaled."""
        kind = self.metadata.get(f"{self.metadata['general.architecture']}.rope.scaling.type", "none")
        return kind != "none" or any(name.startswith("rope_f") for name in self.names)

    def settle(self, model: PreTrainedModel) -> None:
        """Have its dequantised model know where it came from, and what ends a text."""
        vars(model.config).pop("_model_name_or_path", None)  # the model's title, not a path
        model.name_or_path = str(self.path)
        ends = list(TokenizerSettings.of(self.metadata).ends)
        config: Any = model.generation_config
        config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None

    def tokenizer(self) -> Any:
        """The tokenizer that it describes, with its chat template, by the file's own settings.

        Raises:
            CheckpointError: there is none in it, or none that can be read faithfully.
        """
        return read_tokenizer(self.path)


class _Table:
    """Where a file's tensors are, those too whose blocks only the package gguf dequantises."""

    def __init__(self, path: Path) -> None:
        import gguf
        from transformers.integrations.gguf.reader import _read_metadata, _read_tensor_table  # GGUFReader takes 5 s

        self.blob = np.memmap(path, mode="r", dtype=np.uint8)
        metadata, count, self.start = _read_metadata(self.blob, str(path))
        self.entries, end = _read_tensor_table(self.blob, count, self.start)
        self._alignment = metadata.get("general.alignment", 32)
        self.data = end + self.missing(end)
        self.sizes = []  # bytes of each tensor
        for _, shape, kind, _ in self.entries:
            values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
            self.sizes.append(math.prod(shape) // values * size)
        self.end = self.data + max(at + size for (*_, at), size in zip(self.entries, self.sizes, strict=True))
        self.strange = {kind for _, _, kind, _ in self.entries} - {*GGML_NAME, *_PLAIN}

    def missing(self, size: int) -> int:
        """Bytes to the next place where something may begin."""
        return -size % int(self._alignment)

    def widen(self, copy: Path) -> None:
        """Write the file again, with the strange tensors in float32.

        Raises:
            CheckpointError: blocks that the package gguf cannot dequantise either.
        """
        import gguf

        table, offset = bytearray(), 0
        for (name, shape, kind, _), size in zip(self.entries, self.sizes, strict=True):
            strange = kind in self.strange
            table += struct.pack("<Q", len(name.encode())) + name.encode()
            table += struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0 if strange else kind, offset)
            offset += 4 * math.prod(shape) if strange else size
            offset += self.missing(offset)
        with copy.open("wb") as file:
            file.write(self.blob[: self.start].data)
            file.write(table)
            for (_, _, kind, at), size in zip(self.entries, self.sizes, strict=True):
                file.write(bytes(self.missing(file.tell())))
                values = self.blob[self.data + at : self.data + at + size]
                if kind in self.strange:
                    blocks = gguf.GGMLQuantizationType(kind)
                    try:
                        values = gguf.quants.dequantize(values, blocks)
                    except NotImplementedError as error:
                        raise CheckpointError(
                            f"{copy.name} holds blocks of {blocks.name}, which cannot be dequantised here; give "
                            "another quantisation, or the model's folder of safetensors"
                        ) from error
                file.write(values.astype(np.float32).data if kind in self.strange else values.data)
