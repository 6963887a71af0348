"""GGUF as a source of tensors for a decoder by its spec: llama.cpp's names, and its changes to values undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from specdec.decoder.gguf_said import factors_read
from specdec.decoder.names import CHOICE, Names
from specdec.decoder.weights.mxfp4 import Mxfp4Rows
from specdec.errors import CheckpointError
from specdec.models.gguf_table import TensorEntry, TensorTable
from specdec.native.formats import WeightFormat, formats
from specdec.runners.block_weight import BlockTensor
from specdec.runners.memory_pages import release_pages

__all__ = ["GGUF_NAMES", "GgufSource", "kept_as", "undone"]

_MXFP4, _Q5_0 = 39, 6  # ggml's numbers; blocks of the latter hold those of the former
_NEIGHBOURS = ("llama", "granite", "granitehybrid", "granitemoe", "smollm3", "mistral3")
"""Architectures whose files have values that turn together beside each other; transformers: half a head apart."""
_FUSED, _EXPERTS_BIAS, _ONE_ROW = ".attn_qkv.", "_exps.bias", ".ffn_gate_inp_shexp.weight"
_OFFSET = ("gemma", "gemma2", "gemma3")
"""Those whose files have norms with the 1 that is added to their weights."""

GGUF_NAMES = Names(
    {
        "embedding": ("token_embd",),
        "norm": ("output_norm",),
        "before.mlp": ("blk.{layer}.ffn_norm", "blk.{layer}.post_attention_norm"),
        **{
            part: (f"blk.{{layer}}.{name}",)
            for part, name in {
                **{"before.attention": "attn_norm", "attention.q": "attn_q", "attention.k": "attn_k"},
                **{"attention.v": "attn_v", "attention.o": "attn_output", "attention.q_norm": "attn_q_norm"},
                **{"attention.k_norm": "attn_k_norm", "after.attention": "post_attention_norm"},
                **{"attention.qkv": "attn_qkv", "after.mlp": "post_ffw_norm", "mlp.gate": "ffn_gate"},
                **{
                    "mlp.gate_up": "ffn_up",
                    "mlp.up": "ffn_up",
                    "mlp.down": "ffn_down",
                    "experts.router": "ffn_gate_inp",
                },
                **{"experts.gate": "ffn_gate_exps.{expert}", "experts.up": "ffn_up_exps.{expert}"},
                **{"experts.down": "ffn_down_exps.{expert}"},
                **{f"shared.{one}": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
                f"experts.router.{CHOICE}": "exp_probs_b.bias",
                **{"shared.router": "ffn_gate_inp_shexp", "attention.sinks": "attn_sinks.weight"},
            }.items()
        },
    },
    prefixes=("",),
    heads=("output",),
    experts={},
    ignored=(),
    stacked={"attention.qkv": ("attention.q", "attention.k", "attention.v")},
)
"""What llama.cpp calls a decoder's tensors; experts are numbered here, as a file has those of a layer in one."""


def kept_as(entry: TensorEntry, dtype: torch.dtype) -> WeightFormat | None:
    """The format in which a decoder in this dtype can hold a matrix as it is in the file, or None.

    One in float16 it does in float32. In bfloat16 it is rounded, as that of any other checkpoint.
    """
    if (one := formats().get(_Q5_0 if entry.type == _MXFP4 else entry.type)) is None or len(entry.shape) < 2:
        return None
    fits = not one.is_float16 or (dtype is torch.float32 and entry.shape[-1] % int(one.values) == 0)
    return one if fits else None


def undone(architecture: str, dim: int, name: str, values: np.ndarray) -> np.ndarray:
    """A tensor's rows, or their numbers, as transformers has them, where llama.cpp changes them; ``dim``: of a head."""
    if architecture in _OFFSET and name.endswith("norm.weight"):
        return values - 1
    if architecture in _NEIGHBOURS and any(part in name for part in (".attn_q.", ".attn_k.")):
        return values.reshape(-1, dim // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return values


class GgufSource:
    """As of :class:`specdec.decoder.weights.source.Source`.

    Numbers by which rotary frequencies are divided are settings, and are none of its tensors.

    Args:
        table: of a file.
        heads: how many there are of queries, and of keys.
        dim: of a head.
        dtype: of the computation.

    Raises:
        CheckpointError: queries, keys and values in one have other rows than their heads, or some of them are there
            apart as well.
    """

    biases_lack = True  # as in llama.cpp

    def __init__(self, table: TensorTable, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
        self.where, self._table, self._dtype = table.where, table, dtype
        self._undone = partial(undone, table.architecture, dim)
        factors = factors_read(table.architecture)
        rows = [count * dim for count in (heads[0], heads[1], heads[1])]
        own = [one for entry in table.entries if entry.name not in factors for one in _apart(table, entry, rows)]
        every = [entry for entry in own if len(entry.shape) == 3 or entry.name.endswith(_EXPERTS_BIAS)]
        self._experts = {one.name: one for entry in every for one in _each(entry)}
        self._entries = {entry.name: _as_matrix(entry) for entry in own if entry not in every}
        known = {**self._entries, **self._experts}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(entry.shape) for name, entry in known.items()}
        self.strange: Mapping[str, str] = {}

    def read(self, name: str) -> torch.Tensor:
        if (expert := self._experts.get(name)) is not None:
            return torch.tensor(self._table.dequantised(expert))
        return torch.tensor(self._undone(name, self._table.dequantised(self._entries[name])))

    def blocks(self, name: str) -> BlockTensor | None:
        entry = self._experts.get(name) or self._entries[name]
        if (form := kept_as(entry, self._dtype)) is None:
            return None
        rows, blocks = np.arange(entry.shape[0]), self._table.rows(entry)
        order = rows if name in self._experts else self._undone(name, rows)
        ordered = np.array_equal(order, rows)
        if entry.type != _MXFP4:
            return BlockTensor(form, blocks, None if ordered else order)
        return _mxfp4(blocks) if ordered else None

    def is_no_bias(self, name: str) -> bool:
        """Of no tensor."""
        return False

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing: what was read is no view of the file."""


def _as_matrix(entry: TensorEntry) -> TensorEntry:
    """A matrix of one row, which a file has flat."""
    return replace(entry, shape=(1, *entry.shape)) if entry.name.endswith(_ONE_ROW) else entry


def _mxfp4(rows: np.ndarray) -> BlockTensor | None:
    """Rows [out, bytes] of blocks of MXFP4 in those of integers."""
    blocks = rows.reshape(len(rows), -1, 17)
    return Mxfp4Rows(blocks[..., 0], blocks[..., 1:], partial(release_pages, rows)).tensor()


def _apart(table: TensorTable, entry: TensorEntry, rows: Sequence[int]) -> list[TensorEntry]:
    """A fused ``attn_qkv`` as three tensors, whose numbers of rows are ``rows``; any other tensor alone."""
    layer, fused, kind = entry.name.partition(_FUSED)
    if not fused:
        return [entry]
    there = {other.name for other in table.entries}
    if kind == "weight" and 0 < sum(f"{layer}.attn_{name}.bias" in there for name in "qkv") < 3:
        raise CheckpointError(
            f"{table.where} has {entry.name}, to which llama.cpp adds biases where all three are there; get it again"
        )
    if entry.shape[0] != sum(rows):
        raise CheckpointError(
            f"{table.where} has {entry.name} of {entry.shape[0]} rows, not {sum(rows)} as its heads say; it is broken: "
            "get it again"
        )
    parts, start = list[TensorEntry](), 0
    for name, count in zip("qkv", rows, strict=True):
        size, named = entry.size // sum(rows), f"{layer}.attn_{name}.{kind}"
        if named in there:
            raise CheckpointError(f"{table.where} has {entry.name} and {named}, which is a part of it; get it again")
        shape, offset = (count, *entry.shape[1:]), entry.offset + start * size
        parts.append(replace(entry, name=named, shape=shape, offset=offset, size=count * size))
        start += count
    return parts


def _each(entry: TensorEntry) -> list[TensorEntry]:
    """The part of each expert in a tensor of all."""
    count, size = entry.shape[0], entry.size // entry.shape[0]
    (name, _, kind), shape = entry.name.rpartition("."), entry.shape[1:]
    return [
        replace(entry, name=f"{name}.{number}.{kind}", shape=shape, offset=entry.offset + number * size, size=size)
        for number in range(count)
    ]
