"""GGUF: models in llama.cpp's files, which transformers dequantises, and the tokenizers that such files describe.

In memory such a model is as large as one from safetensors: two bytes a parameter in bfloat16, four in float32, however
few bits the file has. Rounding to bfloat16 is far finer than the quantisation that came before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedModel
from transformers.integrations.gguf.dequant import GGML_NAME
from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata

from specdec.errors import CheckpointError, ConfigError, SpecdecWarning, first_line, pip_line

__all__ = ["GgufFile", "is_gguf", "require_gguf"]

# How llama.cpp calls the splitting of a text before byte pairs are merged: every digit alone, then GPT-2's rule; and
# that rule alone. Transformers knows some others, and splits by GPT-2's rule what it does not know.
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling")

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
        reader: the ``gguf.GGUFReader`` of a file with kinds of blocks that transformers does not dequantise; see
            :meth:`opened`.
    """

    path: Path
    metadata: Mapping[str, Any]
    names: tuple[str, ...]
    dtype: torch.dtype
    reader: Any = None

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read all but the weights.

        Raises:
            ConfigError: there is no package to read the weights with.
            CheckpointError: it is no GGUF file, or a broken or unfinished one.
        """
        require_gguf()
        import gguf  # not at the top: an extra

        remedy = "it is broken or was not fetched whole; get it again"
        try:
            metadata, names = read_gguf_metadata(str(path))
            try:
                header = GgufHeader.from_file(str(path))
            except ValueError:
                if not _other_blocks(reader := gguf.GGUFReader(path)):  # which raises if the file is not whole
                    raise
                return cls(path, metadata, names, torch.bfloat16, reader)
            needed = header.data_start + max(one.offset + one.nbytes for one in header.tensors)
        except Exception as error:  # the reader goes by the lengths in the file, and a broken one may raise anything
            raise CheckpointError(f"cannot read {str(path)!r} as GGUF: {first_line(error)}; {remedy}") from error
        if (size := path.stat().st_size) < needed:
            raise CheckpointError(f"{str(path)!r} ends after {size} of {needed} bytes; {remedy}")
        return cls(path, metadata, names, header.dtype or torch.bfloat16)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """A file that transformers reads: this one, or while it is wanted a copy, with tensors in float32 that
        transformers does not dequantise, such as Q5_0's, which 4-bit files have where rows are no multiple of 256.

        Raises:
            CheckpointError: blocks that the package gguf cannot dequantise either.
            OSError: no room for the copy.
        """
        if self.reader is None:
            yield self.path
            return
        with TemporaryDirectory(prefix="specdec-") as folder:
            copy = Path(folder, self.path.name)
            _widen(self.reader, copy)
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


def _other_blocks(reader: Any) -> set[str]:
    """Names of the tensors of a ``gguf.GGUFReader`` that transformers has no way to dequantise."""
    known = {*GGML_NAME, *_PLAIN}
    return {tensor.name for tensor in reader.tensors if tensor.tensor_type not in known}


def _widen(reader: Any, copy: Path) -> None:
    """Write what a ``gguf.GGUFReader`` reads, with the tensors that transformers cannot dequantise in float32."""
    import gguf

    other = _other_blocks(reader)
    architecture = "general.architecture"  # the writer adds it by itself
    writer = gguf.GGUFWriter(copy, reader.fields[architecture].contents())
    for name, field in reader.fields.items():
        if name != architecture and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1])
    for tensor in reader.tensors:
        if tensor.name in other:
            size = 4 * int(tensor.n_elements)
            writer.add_tensor_info(tensor.name, tensor.shape[::-1].tolist(), np.dtype(np.float32), size)
        else:
            writer.add_tensor_info(
                tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in other:
            try:
                data = gguf.quants.dequantize(data, tensor.tensor_type)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"{copy.name} holds blocks of {tensor.tensor_type.name}, which cannot be dequantised here; "
                    "give another quantisation, or the model's folder of safetensors"
                ) from error
        writer.write_tensor_data(data)
    writer.close()
