"""GGUF models that no spec describes, for transformers' model classes: a file's weights, dequantised, by their names.

The package gguf knows what transformers calls a tensor. Some of its weights are made of several tensors, such as gate
and up of experts, which are apart in a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from specdec.decoder.gguf_said import factors_read
from specdec.errors import CheckpointError
from specdec.models.gguf_source import undone
from specdec.models.gguf_table import TensorEntry, TensorTable
from specdec.models.gguf_tensors import check_known, check_read

__all__ = ["dense_weights"]

_OPTIONAL = re.compile(r".*\.(self_attn|mlp)\.\w+\.bias")  # zeros where the file lacks one, as in llama.cpp
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(gate_up|down)_proj(_bias)?")
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.input_linear\.weight")
_OWN = (  # weights whose names the package gguf does not know
    (re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks"), "blk.{}.attn_sinks.weight"),
    (re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.router\.weight"), "blk.{}.ffn_gate_inp.weight"),
    (re.compile(r"model\.layers\.(\d+)\.shared_mlp\.output_linear\.weight"), "blk.{}.ffn_down_shexp.weight"),
)


def dense_weights(table: TensorTable, config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights of transformers' model of a config, from a file; all are looked for before one is read.

    Raises:
        CheckpointError: a tensor is missing, is left over, or its shape differs from the model's.
    """
    reading = _Reading(table, config)
    return {name: reading.weight(name, shape).to(dtype) for name, shape in reading.shapes.items()}


@dataclass(frozen=True)
class _Joined:
    """A weight that is made of several tensors, or of one in another order.

    Attributes:
        parts: names of the tensors.
        turned: inputs come before outputs in the weight, and outputs of gate and up alternate.
        axis: along which parts follow each other in a weight that is not turned.
    """

    parts: tuple[str, ...]
    turned: bool = False
    axis: int = 1

    def shape_of_part(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of each tensor, where the weight has this one."""
        own = [*shape]
        if self.turned and len(own) == 3:
            own[1:] = own[:0:-1]
        own[self.axis] //= len(self.parts)
        return tuple(own)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The weight, of the tensors' values."""
        if not self.turned:
            return np.concatenate(parts, axis=self.axis)
        mixed = np.stack(parts, axis=2)
        mixed = mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])
        return mixed.swapaxes(1, 2) if mixed.ndim == 3 else mixed


class _Reading:
    """Which tensors of a file are which weights of a model.

    Attributes:
        shapes: of the weights; a head that is the embedding is none.
    """

    def __init__(self, table: TensorTable, config: Any) -> None:
        self._table, self._dim = table, int(config.head_dim)
        classes: Any = AutoModelForCausalLM
        with init_empty_weights():
            model: Any = classes.from_config(config)
        self._class = type(model).__name__
        self.shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
        if config.tie_word_embeddings:
            self.shapes.pop("lm_head.weight", None)
        names = self._names(config.num_hidden_layers)
        self._entries = {names.get(entry.name, entry.name): entry for entry in table.entries}
        self._check()

    def _names(self, layers: int) -> dict[str, str]:
        """A tensor's name in the file -> transformers'."""
        import gguf

        found = dict[str, str]()
        arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self._table.architecture)
        known = gguf.get_tensor_name_map(arch, layers)
        for name in self.shapes:
            place, _, kind = name.rpartition(".")
            if kind in ("weight", "bias") and (tensor := known.get_name(place)) is not None:
                found[f"{tensor}.{kind}"] = name
            found |= {own.format(match[1]): name for pattern, own in _OWN if (match := pattern.fullmatch(name))}
        return found

    def _check(self) -> None:
        """Raises CheckpointError unless the file has all tensors that the model needs, in its shapes, and no others."""
        joined = {name: found for name in self.shapes if (found := self._joined(name)) is not None}
        needed = [name for name in self.shapes if name not in joined and not self._is_absent(name)]
        have = {self._entries[name].name for name in needed if name in self._entries}
        have |= {*factors_read(self._table.architecture), *(part for one in joined.values() for part in one.parts)}
        check_known(self._table, have)
        for name in needed:
            self._entry(name, self.shapes[name])
        for name, one in joined.items():
            for part in one.parts:
                self._entry(part, one.shape_of_part(self.shapes[name]))
        check_read(self._table, have)

    def _joined(self, name: str) -> _Joined | None:
        """What a weight is made of; None where one tensor is the weight."""
        if found := _EXPERTS.fullmatch(name):
            kind = "bias" if found[3] else "weight"
            parts = tuple(f"blk.{found[1]}.ffn_{part}_exps.{kind}" for part in found[2].split("_"))
            return _Joined(parts, turned=self._table.architecture == "gpt-oss")
        if found := _SHARED.fullmatch(name):
            return _Joined(tuple(f"blk.{found[1]}.ffn_{part}_shexp.weight" for part in ("gate", "up")), axis=0)
        return None

    def _is_absent(self, name: str) -> bool:
        return name not in self._entries and _OPTIONAL.fullmatch(name) is not None

    def weight(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A weight in float32."""
        if self._is_absent(name):
            return torch.zeros(*shape)
        if (joined := self._joined(name)) is not None:
            return torch.tensor(joined.join([self._table.dequantised(self._entries[part]) for part in joined.parts]))
        entry = self._entries[name]
        values = undone(self._table.architecture, self._dim, entry.name, self._table.dequantised(entry))
        return torch.tensor(values).view(*shape)

    def _entry(self, name: str, shape: Sequence[int]) -> TensorEntry:
        if (entry := self._entries.get(name)) is None:
            raise self._unfit(f"1 missing, such as {name}")
        if entry.shape != tuple(shape) and (1, *entry.shape) != tuple(shape):  # llama.cpp has a matrix of one row flat
            raise self._unfit(f"1 misshapen, such as {name}, {list(entry.shape)} in place of {list(shape)}")
        return entry

    def _unfit(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self._table.where} does not fit {self._class}: tensors {what}; "
            "it was saved from another architecture or is incomplete"
        )
