"""What heads in the native library share: weights that it reads by address, rotary positions, and what it can run."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from drafters.heads.config import HeadConfig
from drafters.heads.layers import Linear
from specdec.native.types import CCosSin
from specdec.runners.linear import HeadOf, PackedWeight
from specdec.runners.native_layers import described_turns, runs_heads_of
from specdec.runners.rotary import Rotary
from specdec.target import Target

__all__ = ["NativeParts", "packed_head", "per_head", "runs"]

_Turns = tuple[ctypes.Array[CCosSin], int, torch.Tensor, torch.Tensor]


class NativeParts:
    """Weights and rotary positions of a head, kept as long as the library may read them.

    Args:
        rotary: the head's rotary positions.
        dtype: dtype of the head.
    """

    def __init__(self, rotary: Rotary, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._rotary, self._like = rotary, torch.empty(1, 0, dtype=dtype)
        self._turns: _Turns | None = None
        self._held = list[Any]()

    def turns(self, end: int) -> ctypes.Array[CCosSin]:
        """Cosines and sines of positions 0 .. ``end`` - 1 or more, for the library; valid while this object is."""
        known = self._turns
        if known is None or known[1] < end:
            cos, _, signed_sin = self._rotary.table(end, self._like)
            tables = cos.float().contiguous(), signed_sin.float().contiguous()
            known = self._turns = (self._hold(described_turns([tables])), len(cos), *tables)
            self._hold(tables)  # another thread may still read shorter ones
        return known[0]

    def _hold(self, thing: Any) -> Any:
        self._held.append(thing)
        return thing

    def _weights(self, *weights: torch.Tensor) -> int:
        """The address of weights in float32, one behind the other."""
        address: int = self._hold(torch.cat([weight.detach().float() for weight in weights])).data_ptr()
        return address


def runs(config: HeadConfig, rotary: Rotary) -> bool:
    """Whether the library has code for a head's layers."""
    fixed = config.activation in ("silu", "swish") and rotary.fixed
    return fixed and runs_heads_of(config.head_dim, config.intermediate_size)


def per_head(config: HeadConfig, attention: Any) -> torch.Tensor | None:
    """[heads, 1, head_dim] weights of the norms of each query and key head, or None."""
    if not config.qk_norm:
        return None
    weights = [attention.q_norm.weight] * config.heads + [attention.k_norm.weight] * config.key_heads
    return torch.stack([weight.detach() for weight in weights])[:, None]


def packed_head(config: HeadConfig, last: Linear, target: Target, dtype: torch.dtype) -> PackedWeight | None:
    """The packed weight that gives a head's logits; None where only the module ``last`` computes them."""
    own: Any = last.packed if isinstance(last, HeadOf) else last
    if not config.own_head and not config.draft_vocab:
        own = target.packed_head
    return own if isinstance(own, PackedWeight) and own.dtype is dtype else None
