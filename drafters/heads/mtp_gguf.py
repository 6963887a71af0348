"""Multi-token-prediction layers in a GGUF file: behind a model's own, or in a file of their own.

llama.cpp numbers them on behind the model's layers (``blk.N.nextn.*``). Where a layer has no last norm, embedding or
head, the model's are meant. Quantised blocks stay what they are where the model's do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from drafters.heads.mtp_layout import EMBEDDING, HEAD, HIDDEN, JOIN, LAST, TABLE, MtpTensors
from specdec.errors import ConfigError
from specdec.models.gguf import GgufFile
from specdec.models.gguf_source import GGUF_NAMES, GgufSource
from specdec.models.gguf_table import TensorEntry, TensorTable

__all__ = ["find_in_gguf"]

_AT_ONCE = 1 << 24  # bytes that are compared
_LAYOUT = "numbered on behind the model's layers (GGUF)"
_NEXTN = {EMBEDDING: "enorm", HIDDEN: "hnorm", JOIN: "eh_proj"}
_OPTIONAL = {LAST: "shared_head_norm", TABLE: "embed_tokens", HEAD: "shared_head_head"}
_OF_MODEL = {LAST: ("output_norm.weight",), TABLE: ("token_embd.weight",), HEAD: ("output.weight", "token_embd.weight")}
"""What has no tensor of its own -> the model's, of which the first that is there counts."""
_NAMED = {part: (f"blk.{{layer}}.nextn.{name}",) for part, name in (_NEXTN | _OPTIONAL).items()}


def find_in_gguf(path: Path, dtype: torch.dtype) -> MtpTensors:
    """The layers in a file; call this within ``reading``.

    ``dtype``: of the computation, which decides what can stay as it is in the file.

    Raises:
        ConfigError: the file has no such layers, or lacks one of their parts.
        CheckpointError: it is no GGUF file, or its header says what is not read.
    """
    file = GgufFile.read(path)
    said = file.header()
    first, layers = said.layers, said.behind
    if not layers:
        raise ConfigError(f"it says {said.architecture}.nextn_predict_layers 0, or nothing of it")
    table = file.table.of(_own_entries(file.table, first, layers))
    _check_finite(table)
    heads, dim = said.heads
    source = GgufSource(table, (heads, said.number("attention.head_count_kv", heads)), dim, dtype)
    return MtpTensors(
        layout=_LAYOUT,
        layers=layers,
        source=source,
        width=said.number("embedding_length"),
        hidden_first=False,
        repeated=False,
        depth=0,
        values={"model_type": said.architecture, "vocab_size": said.vocabulary},
        folder=path,
        called=replace(GGUF_NAMES, decoder={**GGUF_NAMES.decoder, **_NAMED}, first=first),
    )


def _name(part: str, number: int) -> str:
    return _NAMED[part][0].format(layer=number) + ".weight"


def _own_entries(table: TensorTable, first: int, layers: int) -> list[TensorEntry]:
    """The entries of the layers: with the model's norm where one has no last norm, without what is the model's as well.

    Raises:
        ConfigError: one is missing without which there is no such layer.
    """
    known = {entry.name: entry for entry in table.entries}
    for number in range(first, first + layers):
        for part in _NEXTN:
            if (wanted := _name(part, number)) not in known:
                raise ConfigError(
                    f"its header says that the last {layers} of its layers are such layers, and there is no {wanted} "
                    "among its tensors: it is incomplete, or was made without them"
                )
        of_model = {part: _first(known, names) for part, names in _OF_MODEL.items()}
        if (norm := of_model[LAST]) is not None:
            known.setdefault(_name(LAST, number), replace(norm, name=_name(LAST, number)))
        for part in (TABLE, HEAD):
            if (one := known.get(_name(part, number))) is not None and _same(table, one, of_model[part]):
                del known[one.name]
    return [entry for name, entry in known.items() if (own := re.match(r"blk\.(\d+)\.", name)) and int(own[1]) >= first]


def _first(known: dict[str, TensorEntry], names: Sequence[str]) -> TensorEntry | None:
    return next((known[name] for name in names if name in known), None)


def _same(table: TensorTable, one: TensorEntry, other: TensorEntry | None) -> bool:
    """Whether two tensors are of the same type and bytes."""
    if other is None or (one.type, one.shape) != (other.type, other.shape):
        return False
    own, others = table.bytes_of(one), table.bytes_of(other)
    some = range(0, one.size, _AT_ONCE)
    return all(np.array_equal(own[at : at + _AT_ONCE], others[at : at + _AT_ONCE]) for at in some)


def _check_finite(table: TensorTable) -> None:
    """Raises ConfigError where numbers that are in no blocks are not all finite."""
    for entry in table.entries:
        if entry.is_plain and not np.isfinite(table.dequantised(entry)).all():
            raise ConfigError(f"{entry.name} holds NaN or infinity")
