"""What heads in the native library share: weights that it reads by address, rotary positions, and what it can run."""

from __future__ import annotations

from typing import Any

import torch

from drafters.heads.config import HeadConfig
from drafters.heads.forward import HeadForward
from drafters.heads.head_step import Linear
from specdec.decoder.head_spec import HeadSpec
from specdec.decoder.rope import RopeTables
from specdec.decoder.spec import Rope
from specdec.execute.native_layers import Turns, runs_heads_of
from specdec.runners.linear import HeadOf, PackedWeight
from specdec.target import Target

__all__ = ["NativeParts", "packed", "packed_head", "runs"]


class NativeParts:
    """Weights and rotary positions of a head, kept as long as the library may read them.

    Args:
        ropes, rope: the head's rotary positions, rounded to its dtype.
        dtype: dtype of the head.

    Attributes:
        turns: the rotary positions for the library.
    """

    def __init__(self, ropes: RopeTables, rope: Rope, dtype: torch.dtype) -> None:
        self.dtype, self.turns = dtype, Turns(ropes, (rope,))
        self._held = list[Any]()

    def _hold(self, thing: Any) -> Any:
        self._held.append(thing)
        return thing

    def _weights(self, *norms: Any) -> int:
        """The address of norms' weights in float32, one behind the other."""
        address: int = self._hold(torch.cat([norm.by.float() for norm in norms])).data_ptr()
        return address


def runs(spec: HeadSpec) -> bool:
    """Whether the library has code for a head's layers."""
    sizes = {(own.attention.head_dim, own.mlp.act, own.mlp.width) for own in spec.layers}
    return all(act == "silu" and runs_heads_of(head_dim, width) for head_dim, act, width in sizes)


def packed(forward: HeadForward) -> bool:
    """Whether the library has all products of a head's layers."""
    layers: Any = forward.layers
    every = [part for own in layers for part in (own.qkv, own.out, own.mlp.gate_up, own.mlp.down)]
    return all(isinstance(part, PackedWeight) for part in every)


def packed_head(config: HeadConfig, last: Linear, target: Target, dtype: torch.dtype) -> PackedWeight | None:
    """The packed weight that gives a head's logits; None where only the module ``last`` computes them."""
    own: Any = last.packed if isinstance(last, HeadOf) else last
    if not config.own_head and not config.draft_vocab:
        own = target.packed_head
    return own if isinstance(own, PackedWeight) and own.dtype is dtype else None
