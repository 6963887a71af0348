"""Rotary positions: cosines and sines from the model's own module, computed once per position and looked up.

A module of transformers takes some fifteen operations a step to say what it said the step before for the next row.
"""

from __future__ import annotations

from typing import Any

import torch

from specdec.block import Block

__all__ = ["Rotary"]

_CHANGING = ("dynamic", "longrope")  # frequencies that depend on the text's length

Angles = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Rotary:
    """Tables of a rotary module.

    Args:
        module: called as ``module(hidden, positions)``, it gives cosines and sines [1, T, d].
        config: of the model; its ``rope_parameters`` say whether positions mean the same in every text.
    """

    def __init__(self, module: Any, config: Any) -> None:
        self._module = module
        rope = getattr(config, "rope_parameters", None) or {}
        self._fixed = rope.get("rope_type", "default") not in _CHANGING
        self._tables: dict[tuple[torch.device, torch.dtype], Angles] = {}

    def of(self, block: Block, hidden: torch.Tensor) -> Angles:
        """For each row, [T, d]: cosines, sines, and the sines with their first half negated."""
        if not self._fixed:
            return self._angles(hidden, block.positions)
        key = (hidden.device, hidden.dtype)
        top = block.length + block.deepest + 1
        if key not in self._tables or len(self._tables[key][0]) < top:
            size = max(1024, 1 << top.bit_length())
            self._tables[key] = self._angles(hidden, torch.arange(size, device=hidden.device)[None])
        table = self._tables[key]
        if block.parents is None:
            start = block.length + block.first
            cos, sin, signed = (values.narrow(0, start, block.rows) for values in table)
        else:
            places = block.positions[0]
            cos, sin, signed = (values.index_select(0, places) for values in table)
        return cos, sin, signed

    def _angles(self, hidden: torch.Tensor, positions: torch.Tensor) -> Angles:
        cos, sin = (values[0] for values in self._module(hidden, positions))
        first, second = sin.chunk(2, -1)
        return cos, sin, torch.cat((-first, second), -1)
