"""Rotary positions for CUDA kernels: whole tables, whose places in memory recorded steps read there, as they grow."""

from __future__ import annotations

import threading

import torch

from specdec.decoder.rope import RopeTables
from specdec.decoder.spec import Rope
from specdec.step import device_copies

__all__ = ["PlacedTables"]


class PlacedTables:
    """Tables of one kind of positions.

    Args:
        tables: makes them.
        rope: which.
        device: of the tables.

    Attributes:
        addresses: int64 [2], of the cosines and of the sines [positions, d], in the device's memory.
        width: d.
    """

    def __init__(self, tables: RopeTables, rope: Rope, device: torch.device) -> None:
        self._tables, self._rope, self._lock = tables, rope, threading.Lock()
        self.width = rope.dim
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        self.addresses = torch.zeros(2, dtype=torch.int64, device=device)

    def reach(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions 0 to ``end`` - 1 or more.

        Writing where they are takes no copy, and comes before later steps.
        """
        with self._lock:  # a thread with a shorter text must not write where shorter tables are
            if self._held is None or len(self._held[0]) < end:
                cos, signed_sin = self._tables.whole(self._rope, end)
                _, half = signed_sin.chunk(2, -1)
                self._held = cos, torch.cat((half, half), -1)
                for place, values in enumerate(self._held):
                    self.addresses[place].fill_(device_copies.address(values))
            return self._held
