"""Slots beside each other, or in a ring: one text's keys and values, for all layers of one spec."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from ctypes import c_int64

import torch

from specdec.native.library import library
from specdec.step import device_copies
from specdec.step.state import Held, LayerSpec, LayerState, Piece, Views

__all__ = ["ContiguousSlots"]

_START = 1024  # slots at first; they are doubled when full, so that a slot is copied once on average


class ContiguousSlots(LayerState):
    """``keys`` and ``values`` are [layers, 1, heads, size, dim]: one tensor each, so that a commit moves all layers.

    They grow up to ``limit`` slots; a ring wraps only once it has ``limit`` slots.
    """

    def __init__(self, spec: LayerSpec, layers: int, limit: int) -> None:
        self.window, self.limit, self.first, self.device = spec.window, limit, 0, spec.device
        self.slot_bytes = layers * spec.slot_bytes
        self.reserves = spec.window is not None  # of a ring rows overwrite the oldest positions
        shape = layers, 1, spec.heads, min(limit, _START)
        sizes = spec.key_dim, spec.value_dim
        self._put(*(torch.empty(*shape, size, dtype=spec.dtype, device=spec.device) for size in sizes))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def place(self, layer: int) -> tuple[int, ...]:
        """The addresses of keys and values, and the number of slots."""
        return device_copies.address(self.keys[layer]), device_copies.address(self.values[layer]), self.size

    def _put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Have these slots."""
        self.keys, self.values, self.size = keys, values, keys.shape[3]
        self.room = self.size if self.size < self.limit else sys.maxsize
        self._each = [
            *zip(keys.unbind(0), values.unbind(0), strict=True)
        ]  # slicing costs more than a tiny layer's write

    def grow(self, end: int) -> None:
        """As of every state; the contents of the old slots are kept."""
        if end <= self.room:
            return
        size, grown = min(self.limit, max(end, 2 * self.size)), []
        for former in (self.keys, self.values):
            grown.append(former.new_empty(*former.shape[:3], size, former.shape[4]))
            grown[-1].narrow(3, 0, self.size).copy_(former)
        self._put(*grown)

    def reserve(self, end: int) -> None:
        self.first = max(self.first, end - self.limit)

    def views(self, first: int = 0, last: int | None = None) -> Views:
        if last is None and not first:
            return self._each
        count = (self.size if last is None else last) - first
        keys, values = (store.narrow(3, first, count).unbind(0) for store in (self.keys, self.values))
        return [*zip(keys, values, strict=True)]

    def parts(self, first: int, last: int) -> Iterable[Piece]:
        slot, count = first % self.size, last - first
        if slot + count <= self.size:
            return [(first, self.keys.narrow(3, slot, count), self.values.narrow(3, slot, count))]
        slots = self.index((first, last))
        return [(first, self.keys.index_select(3, slots), self.values.index_select(3, slots))]

    def fill(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for layer in range(len(keys)):
            self.write(layer, first, keys[layer], values[layer])

    def write(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows, slot = keys.shape[2], first % self.size
        for store, given in zip(self._each[layer], (keys, values), strict=True):
            if slot + rows <= self.size:
                store.narrow(2, slot, rows).copy_(given)
            else:
                store.index_copy_(2, self.index((first, first + rows)), given)

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def move(self, source: Sequence[int], first: int) -> None:
        count = len(source)
        found = None if device_copies.is_apart(self.device) else library()
        if found is not None:
            wanted = (c_int64 * count)(*source)
            for store in (self.keys, self.values) if self.values.numel() else (self.keys,):
                bytes_each = store.shape[-1] * store.element_size()
                lists = store.shape[0] * store.shape[2]
                found.specdec_move(store.data_ptr(), lists, self.size, bytes_each, wanted, first, count)
            return
        # Each row moves down, so no row is overwritten before it is read. An index would cost a copy to the device.
        for new, old in enumerate(source, first):
            for store in (self.keys, self.values):
                store.select(3, new % self.size).copy_(store.select(3, old % self.size))

    def take(self, held: Held, first: int, count: int) -> None:
        if first:  # masked slots are read too, and what is in them must be numbers
            self.clear()
        super().take(held, first, count)
