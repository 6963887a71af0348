"""A model's tokenizer, from the place that the model comes from."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specdec.errors import CheckpointError, shown, told
from specdec.models.gguf import GgufFile, is_gguf
from specdec.models.git_lfs import refuse_pointers
from specdec.models.names import model_source

__all__ = ["load_tokenizer"]

_SENTENCEPIECE = b"\n"  # with which its files begin
_PACKAGES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""What reads SentencePiece's files: package -> module."""


def load_tokenizer(model: str | Path, *, trust_remote_code: bool = False, local_files_only: bool = False) -> Any:
    """The tokenizer of a named model, a folder, a GGUF file, or a hub id.

    Raises:
        CheckpointError: there is none, or a broken one.
    """
    place = model_source(model, weights=False, code=trust_remote_code, local_files_only=local_files_only)
    if is_gguf(place):
        return GgufFile.read(place).tokenizer()
    refuse_pointers(place)
    try:
        found = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
        if {*found.get_vocab()} <= {*found.added_tokens_encoder, *found.all_special_tokens}:
            # Without files, transformers makes a tokenizer of some classes (Qwen2, Gemma, GPT-2) all the same.
            raise ValueError(f"a {type(found).__name__} without a vocabulary, as its files are not there")
        return found
    except Exception as error:  # files of others, read by several libraries: they raise anything
        raise CheckpointError(f"no tokenizer at {shown(str(model), 400)}: {_cause(place, error)}") from error


def _cause(place: Path, error: Exception) -> str:
    """Why there is no tokenizer, and the remedy."""
    pieces = Path(place, "tokenizer.model")
    if pieces.is_file() and not Path(place, "tokenizer.json").exists() and pieces.read_bytes()[:1] == _SENTENCEPIECE:
        lacking = [name for name, module in _PACKAGES.items() if not _installed(module)]
        if lacking:
            return (
                f"its tokenizer.model is SentencePiece's, and what reads it is not installed: pip install "
                f"{' '.join(lacking)}, or save a tokenizer.json beside it"
            )
    return (
        f"{told(error)}; save one beside the weights, mend its tokenizer.json and tokenizer_config.json, or name "
        "another model's (--tokenizer)"
    )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
