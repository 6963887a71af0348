"""GGUF: models in llama.cpp's files, and the tokenizers that such files describe.

Where native layers run a model, its quantised blocks stay what they are (:mod:`specdec.models.gguf_blocks`).
Otherwise transformers dequantises them, and the model is as large as one from safetensors: two bytes a parameter in
bfloat16, four in float32. Rounding to bfloat16 is far finer than the quantisation that came before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.errors import CheckpointError, ConfigError, first_line, pip_line
from specdec.models.gguf_blocks import config_of, why_dequantised
from specdec.models.gguf_table import TensorTable
from specdec.models.gguf_tokenizer import TokenizerSettings, read_tokenizer

__all__ = ["GgufFile", "is_gguf", "require_gguf"]

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by ggml's numbers


def is_gguf(place: str | Path) -> bool:
    """Whether a model's place is a GGUF file."""
    return Path(place).suffix.lower() == ".gguf"


def require_gguf() -> None:
    """Raises ConfigError where the package that reads GGUF weights is not installed."""
    if find_spec("gguf") is None:
        raise ConfigError(f"GGUF files are read by the package gguf, which is not installed: {pip_line('gguf')}")


@dataclass(frozen=True)
class GgufFile:
    """A file that is whole: its settings, and where its tensors are."""

    path: Path
    table: TensorTable

    @property
    def metadata(self) -> Mapping[str, Any]:
        """By llama.cpp's keys; of lists of words their length."""
        return self.table.metadata

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.table.entries)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, bfloat16 where they are quantised."""
        types = {entry.type for entry in self.table.entries}
        if not types <= _PLAIN.keys():
            return torch.bfloat16
        return next(_PLAIN[kind] for kind in (30, 1, 0) if kind in types)

    def config(self) -> Any:
        """As transformers makes it of the file."""
        return config_of(self.metadata, self.names)

    def why_dequantised(self, dtype: str | torch.dtype, device: Any) -> str | None:
        """Why its blocks are not read as they lie, or None where they are."""
        return why_dequantised(self.table, getattr(torch, dtype) if isinstance(dtype, str) else dtype, device)

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
            table = TensorTable(path)
        except Exception as error:  # the reader goes by the lengths in the file, and a broken one may raise anything
            why = first_line(error).rstrip(".")
            raise CheckpointError(f"cannot read {str(path)!r} as GGUF: {why}; {remedy}") from error
        if (size := path.stat().st_size) < table.end:
            raise CheckpointError(f"{str(path)!r} ends after {size} of {table.end} bytes; {remedy}")
        return cls(path, table)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """A file that transformers reads: this one, or while it is wanted a copy, with tensors in float32 that
        transformers does not dequantise, such as Q5_0's, which 4-bit files have where rows are no multiple of 256.

        Raises:
            CheckpointError: blocks that the package gguf cannot dequantise either.
            OSError: no room for the copy.
        """
        if not self.table.strange:
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
