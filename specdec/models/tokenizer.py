"""A model's tokenizer, from the place that the model comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specdec.errors import CheckpointError, shown, told
from specdec.models.gguf import GgufFile, is_gguf
from specdec.models.loading import model_source

__all__ = ["load_tokenizer"]


def load_tokenizer(model: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """The tokenizer of a named model, a folder, a GGUF file, or a hub id.

    Raises:
        CheckpointError: there is none, or a broken one.
    """
    place = model_source(model)
    if is_gguf(place):
        return GgufFile.read(Path(place)).tokenizer()
    try:
        found = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
        if {*found.get_vocab()} <= {*found.added_tokens_encoder, *found.all_special_tokens}:
            # Without files, transformers makes a tokenizer of some classes (Qwen2, Gemma, GPT-2) all the same.
            raise ValueError(f"a {type(found).__name__} without a vocabulary, as its files are not there")
        return found
    except Exception as error:  # files of others, read by several libraries: they raise anything
        raise CheckpointError(
            f"no tokenizer at {shown(str(model), 400)}: {told(error)}; save one beside the weights, or mend its "
            "tokenizer.json and tokenizer_config.json"
        ) from error
