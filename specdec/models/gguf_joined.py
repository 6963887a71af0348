"""Weights of a model that several tensors of a GGUF file make: gate and up of experts, which are apart there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Joined", "joined_from", "own_names"]

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(gate_up|down)_proj(_bias)?")
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.input_linear\.weight")
_OWN = (  # weights whose names the package gguf does not know
    (re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks"), "blk.{}.attn_sinks.weight"),
    (re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.router\.weight"), "blk.{}.ffn_gate_inp.weight"),
    (re.compile(r"model\.layers\.(\d+)\.shared_mlp\.output_linear\.weight"), "blk.{}.ffn_down_shexp.weight"),
)


@dataclass(frozen=True)
class Joined:
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


def joined_from(name: str, family: str) -> Joined | None:
    """What a weight of transformers' name is made of; None where one tensor is the weight."""
    if found := _EXPERTS.fullmatch(name):
        kind = "bias" if found[3] else "weight"
        parts = tuple(f"blk.{found[1]}.ffn_{part}_exps.{kind}" for part in found[2].split("_"))
        return Joined(parts, turned=family == "gpt-oss")
    if found := _SHARED.fullmatch(name):
        return Joined(tuple(f"blk.{found[1]}.ffn_{part}_shexp.weight" for part in ("gate", "up")), axis=0)
    return None


def own_names(names: Sequence[str]) -> dict[str, str]:
    """Names of tensors -> those of transformers among ``names``, where the package gguf has none."""
    found = ((pattern.fullmatch(name), name, tensor) for name in names for pattern, tensor in _OWN)
    return {tensor.format(match[1]): name for match, name, tensor in found if match is not None}
