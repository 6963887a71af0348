"""Files that are no model in GGUF, though they look like one: each is refused by its cause, with the remedy for it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import CheckpointError, shown
from specdec.models.git_lfs import refuse_pointer

__all__ = ["refuse_head", "refuse_kind"]

_FORMER = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # of llama.cpp's files before GGUF
_LORA = (".lora_a", ".lora_b")
_KINDS = {
    "adapter": "is an adapter and no model; merge it into its model with llama.cpp's llama-export-lora, "
    "or load base and adapter with peft and hand the model to TransformersTarget",
    "mmproj": "is a vision or audio projector (general.type mmproj) and no model; give the language model's file",
    "imatrix": "is an importance matrix (general.type) and no model; give the model's file",
    "vocab": "has a vocabulary (general.type) and no weights; give the model's file",
}


def refuse_head(path: Path) -> None:
    """Raises CheckpointError for a file whose first bytes are of another kind of file, or of another byte order."""
    refuse_pointer(path)
    with path.open("rb") as file:
        head = file.read(8)
    if head[:4] in _FORMER:
        raise CheckpointError(
            f"{str(path)!r} is of llama.cpp's format before GGUF, which nothing reads any more; get the model as GGUF"
        )
    if head[:4] == b"GGUF" and len(head) == 8:
        version, swapped = (struct.unpack(f"{order}I", head[4:])[0] for order in "<>")
        if swapped < version:
            raise CheckpointError(
                f"{str(path)!r} is big-endian, and GGUF files are read here in little-endian; get such a one, or "
                "convert it with gguf-py's gguf_convert_endian.py"
            )
        if version == 1:
            raise CheckpointError(f"{str(path)!r} is GGUF of version 1, of 2023; get a newer file, of version 2 or 3")


def refuse_kind(where: str, metadata: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """Raises CheckpointError where a file's settings, or the names of its tensors, say that it is no model."""
    kind = "adapter" if any(name.endswith(_LORA) for name in tensors) else metadata.get("general.type", "model")
    if (why := _KINDS.get(str(kind))) is not None:
        raise CheckpointError(f"{where!r} {why}")
    if kind != "model":
        raise CheckpointError(f"{where!r} says general.type {shown(kind)} and not model; give a model's file")
