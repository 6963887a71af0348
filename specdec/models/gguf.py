"""GGUF: models in llama.cpp's file format, and the tokenizers that such files describe.

Where native layers run a model, its blocks stay quantised (:mod:`specdec.models.gguf_source`). Otherwise they are
dequantised, by transformers where a model is spread over devices, and it takes as much memory as one from safetensors:
two bytes a parameter in bfloat16, four in float32. Rounding to bfloat16 changes a weight far less than its
quantisation did.
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

from specdec.errors import ConfigError, pip_line
from specdec.models.gguf_config import config_of
from specdec.models.gguf_kinds import refuse_kind
from specdec.models.gguf_table import TensorTable
from specdec.models.gguf_tensors import check_blocks
from specdec.models.gguf_tokenizer import ends_of, read_tokenizer

__all__ = ["GgufFile", "is_gguf", "require_gguf"]

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml's numbers of unquantised types


def is_gguf(place: str | Path) -> bool:
    """Whether a path is a GGUF file, by its name or its first bytes: caches of files have names of their own."""
    if Path(place).suffix.lower() == ".gguf":
        return True
    try:
        with Path(place).open("rb") as file:
            return file.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False


def require_gguf() -> None:
    """Raises ConfigError where the package that reads GGUF weights is not installed."""
    if find_spec("gguf") is None:
        raise ConfigError(f"GGUF files are read by the package gguf, which is not installed: {pip_line('gguf')}")


@dataclass(frozen=True)
class GgufFile:
    """A complete model in GGUF: its settings and its tensors; ``path`` is its file, or the first of its parts."""

    path: Path
    table: TensorTable

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's settings by llama.cpp's keys; a list of words is given as its length."""
        return self.table.metadata

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.table.entries)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype; bfloat16 where they are quantised."""
        types = {entry.type for entry in self.table.entries}
        if not types <= _PLAIN.keys():
            return torch.bfloat16
        return next(_PLAIN[kind] for kind in (30, 1, 0) if kind in types)

    def config(self) -> Any:
        """The config of transformers that the file's settings make.

        Raises:
            CheckpointError: they say what is not read, or do not fit the file's tensors.
        """
        config = config_of(self.table)
        check_blocks(self.table, config.num_hidden_layers)
        return config

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the settings and table of a file, and of all parts where it is one of several, but no weights.

        Raises:
            ConfigError: the package that reads the weights is missing.
            CheckpointError: a file is not GGUF, or is broken or incomplete; or a part is missing.
        """
        require_gguf()
        table = TensorTable(path)
        refuse_kind(str(path), table.metadata)
        return cls(table.paths[0], table)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Path of a file that transformers reads: this one, or a temporary copy. The copy joins parts, and has tensors
        in float32 whose type transformers does not dequantise, such as Q5_0, which 4-bit files use for rows that 256
        does not divide.

        Raises:
            CheckpointError: the package gguf cannot dequantise a block either.
            OSError: there is not enough space for the copy.
        """
        if not self.table.strange and len(self.table.paths) == 1:
            yield self.path
            return
        with TemporaryDirectory(prefix="specdec-") as folder:
            copy = Path(folder, self.path.name)
            self.table.widen(copy)
            yield copy

    def settle(self, model: PreTrainedModel) -> None:
        """Set the dequantised model's source and the tokens that end a text."""
        vars(model.config).pop("_model_name_or_path", None)  # it holds the model's title, not a path
        model.name_or_path = str(self.path)
        ends = ends_of(self.path)
        config: Any = model.generation_config
        config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None

    def tokenizer(self) -> Any:
        """The tokenizer that the file describes, with its chat template and settings.

        Raises:
            CheckpointError: the file has no tokenizer, or one that cannot be reproduced exactly.
        """
        return read_tokenizer(self.path)
