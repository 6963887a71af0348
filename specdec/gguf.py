"""GGUF: models in llama.cpp's files, which transformers dequantises, and the tokenizers that such files describe.

In memory such a model is as large as one from safetensors: two bytes a parameter in bfloat16, four in float32, however
few bits the file has. Rounding to bfloat16 is far finer than the quantisation that came before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from specdec.errors import CheckpointError, ConfigError, SpecdecWarning, first_line, pip_line

# How llama.cpp calls the splitting of a text before byte pairs are merged: every digit alone, then GPT-2's rule; and
# that rule alone. Transformers knows some others, and splits by GPT-2's rule what it does not know.
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling")


def is_gguf(place: str | Path) -> bool:
    """Whether a model's place is a GGUF file."""
    return Path(place).suffix.lower() == ".gguf"


def require_gguf() -> None:
    """Raises ConfigError where the package that reads GGUF weights is not installed."""
    if find_spec("gguf") is None:
        raise ConfigError(f"GGUF files are read by the package gguf, which is not installed: {pip_line('gguf')}")


@dataclass(frozen=True)
class GgufFile:
    """A file that is whole: its metadata by llama.cpp's keys, and its table of tensors."""

    path: Path
    metadata: Mapping[str, Any]
    header: GgufHeader

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
            metadata, _ = read_gguf_metadata(str(path))
            header = GgufHeader.from_file(str(path))
            needed = header.data_start + max(one.offset + one.nbytes for one in header.tensors)
        except Exception as error:  # the reader goes by the lengths in the file, and a broken one may raise anything
            raise CheckpointError(f"cannot read {str(path)!r} as GGUF: {first_line(error)}; {remedy}") from error
        if (size := path.stat().st_size) < needed:
            raise CheckpointError(f"{str(path)!r} ends after {size} of {needed} bytes; {remedy}")
        return cls(path, metadata, header)

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights, bfloat16 where they are quantised."""
        return self.header.dtype or torch.bfloat16

    @property
    def scales_positions(self) -> bool:
        """Whether its rotary frequencies are scaled."""
        kind = self.metadata.get(f"{self.metadata['general.architecture']}.rope.scaling.type", "none")
        return kind != "none" or any(one.name.startswith("rope_f") for one in self.header.tensors)

    def settle(self, model: PreTrainedModel) -> None:
        """Have its dequantised model know where it came from, and what ends a text."""
        vars(model.config).pop("_model_name_or_path", None)  # the model's title, not a path
        model.name_or_path = str(self.path)
        known = (self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        ends = sorted({end for end in known if end is not None})
        config: Any = model.generation_config
        config.eos_token_id = ends if len(ends) > 1 else ends[0] if ends else None

    def tokenizer(self) -> Any:
        """The tokenizer that it describes, with its chat template.

        Transformers splits by GPT-2's rule where it does not know the file's: mended for rules that are known here,
        others are named in a SpecdecWarning.

        Raises:
            CheckpointError: there is none in it, or none that transformers can build.
        """
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
        except Exception as error:  # as above
            raise CheckpointError(
                f"no tokenizer in {str(self.path)!r}: {first_line(error)}; load the model's folder of safetensors"
            ) from error
        rule, backend = self.metadata.get("tokenizer.ggml.pre"), tokenizer.backend_tokenizer
        if self.metadata.get("tokenizer.ggml.model") != "gpt2" or not isinstance(
            backend.pre_tokenizer, pre_tokenizers.ByteLevel
        ):
            return tokenizer
        if rule in _DIGITS_ALONE:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
        elif rule not in _AS_GPT2:
            warnings.warn(
                f"{self.path.name} splits texts by the rule {rule!r}, which is not known here; GPT-2's is taken, so "
                "some prompts become other tokens than they should. A folder of safetensors has its own tokenizer",
                SpecdecWarning,
                stacklevel=2,
            )
        return tokenizer
