"""GGUF as a source of tensors for a decoder by its spec; transformers' tables undo llama.cpp's changes to values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    Gemma2TensorProcessor,
    LlamaTensorProcessor,
    TensorProcessor,
)

from specdec.decoder.names import Names
from specdec.models.gguf_rope import factors_read
from specdec.models.gguf_table import TensorEntry, TensorTable
from specdec.native.formats import formats
from specdec.runners.block_weight import BlockTensor

__all__ = ["GGUF_NAMES", "PROCESSORS", "GgufSource"]

PROCESSORS = {
    **TENSOR_PROCESSORS,
    "gemma": Gemma2TensorProcessor,
    **dict.fromkeys(("granite", "granitemoe", "smollm3", "mistral3"), LlamaTensorProcessor),
}
"""Architecture -> what undoes llama.cpp's changes to its tensors."""

GGUF_NAMES = Names(
    {
        "embedding": ("token_embd",),
        "norm": ("output_norm",),
        **{
            part: (f"blk.{{layer}}.{name}",)
            for part, name in {
                **{"before.attention": "attn_norm", "attention.q": "attn_q", "attention.k": "attn_k"},
                **{"attention.v": "attn_v", "attention.o": "attn_output", "attention.q_norm": "attn_q_norm"},
                **{"attention.k_norm": "attn_k_norm", "after.attention": "post_attention_norm"},
                **{"before.mlp": "ffn_norm", "after.mlp": "post_ffw_norm", "mlp.gate": "ffn_gate"},
                **{"mlp.up": "ffn_up", "mlp.down": "ffn_down", "experts.router": "ffn_gate_inp"},
                **{"experts.gate": "ffn_gate_exps.{expert}", "experts.up": "ffn_up_exps.{expert}"},
                **{"experts.down": "ffn_down_exps.{expert}"},
            }.items()
        },
    },
    prefixes=("",),
    heads=("output",),
    experts="",
    ignored=(),
)
"""What llama.cpp calls a decoder's tensors; experts are numbered here, as a file has those of a layer in one."""


class GgufSource:
    """As of :class:`specdec.decoder.weights.source.Source`.

    Numbers by which rotary frequencies are divided are in the config, and are none of its tensors.

    Args:
        table: of a file.
        config: of transformers, made of the file's settings.
    """

    biases_lack = True  # as in llama.cpp

    def __init__(self, table: TensorTable, config: Any) -> None:
        self.where, self._table = table.where, table
        factors = factors_read(str(table.metadata["general.architecture"]))
        sizes = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        processor: Any = PROCESSORS.get(str(table.metadata["general.architecture"]), TensorProcessor)
        self._process = processor(config=sizes).process
        own = [entry for entry in table.entries if entry.name not in factors]
        self._entries = {entry.name: entry for entry in own if len(entry.shape) < 3}
        self._experts = {one.name: one for entry in own if len(entry.shape) == 3 for one in _each(entry)}
        every = {**self._entries, **self._experts}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(entry.shape) for name, entry in every.items()}
        self.strange: Mapping[str, str] = {}

    def read(self, name: str) -> torch.Tensor:
        if (expert := self._experts.get(name)) is not None:
            return torch.tensor(self._table.dequantised(expert))
        return torch.tensor(self._processed(self._table.dequantised(self._entries[name]), name))

    def blocks(self, name: str) -> BlockTensor | None:
        entry = self._experts.get(name) or self._entries[name]
        if entry.type not in formats() or len(entry.shape) < 2:
            return None
        rows = np.arange(entry.shape[0])
        order = rows if name in self._experts else self._processed(rows, name)
        return BlockTensor(
            formats()[entry.type], self._table.rows(entry), None if np.array_equal(order, rows) else order
        )

    def is_no_bias(self, name: str) -> bool:
        """Of no tensor."""
        return False

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing: what was read is no view of the file."""

    def _processed(self, values: np.ndarray, name: str) -> np.ndarray:
        """A tensor's values after transformers has undone llama.cpp's changes to them."""
        found: np.ndarray = self._process(
            weights=values, name=name, tensor_key_mapping={}, parsed_parameters={}
        ).weights
        return found


def _each(entry: TensorEntry) -> list[TensorEntry]:
    """The part of each expert in a tensor of all."""
    count, size = entry.shape[0], entry.size // entry.shape[0]
    name, shape = entry.name.removesuffix(".weight"), entry.shape[1:]
    return [
        replace(entry, name=f"{name}.{number}.weight", shape=shape, offset=entry.offset + number * size, size=size)
        for number in range(count)
    ]
