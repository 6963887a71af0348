"""GGUF: models in llama.cpp's file format, and the tokenizers that such files describe.

On a CPU with a C compiler its blocks stay quantised, and its float16 matrices float16
(:mod:`specdec.models.gguf_source`). Elsewhere they are dequantised, and it takes as much memory as one from
safetensors: two bytes a parameter in bfloat16, four in float32. Rounding to bfloat16 changes a weight far less than its
quantisation did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig

from specdec.decoder.gguf import fields_of
from specdec.decoder.gguf_header import GgufHeader
from specdec.errors import CheckpointError, ConfigError, pip_line
from specdec.models.gguf_kinds import refuse_kind
from specdec.models.gguf_table import TensorTable
from specdec.models.gguf_tensors import check_blocks
from specdec.models.gguf_tokenizer import ends_of, read_tokenizer
from specdec.models.long_context import take_long_factors

__all__ = ["GgufFile", "config_of", "generation_of", "is_gguf", "require_gguf"]

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

    def header(self) -> GgufHeader:
        entries = {entry.name: entry for entry in self.table.entries}

        def numbers(name: str) -> list[float]:
            found: list[float] = self.table.dequantised(entries[name]).ravel().tolist()
            return found

        return GgufHeader(self.table.architecture, self.metadata, entries, numbers, self.table.where)

    def fields(self, asked: int | None = None) -> dict[str, Any]:
        """The settings of the file's family, by transformers' names.

        ``asked``: as of :func:`take_long_factors`.

        Raises:
            CheckpointError: they say what is not read, or do not fit the file's tensors.
        """
        header = self.header()
        fields = fields_of(header)
        check_blocks(self.table, fields["num_hidden_layers"], header.behind)
        take_long_factors(fields, asked)
        return fields

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the settings and table of a file, and of all parts where it is one of several, but no weights.

        Raises:
            ConfigError: the package that reads the weights is missing.
            CheckpointError: a file is not GGUF, or is broken or incomplete; or a part is missing.
        """
        require_gguf()
        table = TensorTable(path)
        refuse_kind(str(path), table.metadata, (entry.name for entry in table.entries))
        return cls(table.paths[0], table)

    def tokenizer(self) -> Any:
        """The tokenizer that the file describes, with its chat template and settings.

        Raises:
            CheckpointError: the file has no tokenizer, or one that cannot be reproduced exactly.
        """
        return read_tokenizer(self.path)


def config_of(fields: Mapping[str, Any]) -> Any:
    """The config of transformers that the settings of a family make.

    Raises:
        CheckpointError: they make none.
    """
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # the file's tokenizer has them
    own = {**fields, **none}
    try:
        return AutoConfig.for_model(own.pop("model_type"), **own)
    except (StrictDataclassError, TypeError, ValueError) as error:
        why = str(error).strip().splitlines()[-1].strip()
        kind = fields["model_type"]
        raise CheckpointError(f"the file's header makes no {kind}: {why}; get the file again") from error


def generation_of(file: GgufFile, config: Any) -> Any:
    """Transformers' defaults for texts of a file's model: they end at the file's ends."""
    ends = ends_of(file.path)
    found: Any = GenerationConfig.from_model_config(config)
    found.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None
    return found
