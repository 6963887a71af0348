"""Slots: where one text's keys and values are, for all layers of one spec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass

import torch

from specdec.native.library import library
from specdec.step import device_copies

__all__ = ["ContiguousSlots", "LayerSpec", "Slices", "Slots"]

Slices = tuple[torch.Tensor, ...]

_START = 1024  # slots at first; they are doubled when full, so that a slot is copied once on average


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's cache: ``heads`` key/value heads of ``key_dim`` and ``value_dim``; ``window`` None = all keys."""

    heads: int
    key_dim: int
    value_dim: int
    window: int | None
    device: torch.device
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of a layer's keys and values of one token."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def slots(self, capacity: int, rows: int) -> int:
        """Slots that a text of ``capacity`` tokens needs with forwards of up to ``rows`` rows."""
        linear = capacity + rows
        return linear if self.window is None else min(linear, self.window + rows - 1)


class Slots(ABC):
    """The slots of all layers of one spec, for one text. Position p is in slot p mod ``size``.

    Attributes:
        window: of the spec.
        device: of the tensors.
        size: slots that there are.
        limit: most positions that are held at once.
        first: the first position that is held. Earlier ones were overwritten or given back, or never written, as in a
            ring that was filled from another one.
    """

    window: int | None
    device: torch.device
    size: int
    limit: int
    first: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values."""

    @abstractmethod
    def place(self, layer: int) -> tuple[int, ...]:
        """What kernels read to find a layer's keys and values, until slots move."""

    @abstractmethod
    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of keys and values [layers, 1, heads, n, dim] of the positions [first, last)."""

    @abstractmethod
    def fill(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [layers, 1, heads, n, dim] of the positions from ``first`` on."""

    @abstractmethod
    def write(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one layer's keys and values [1, heads, T, dim] of the positions from ``first`` on."""

    @abstractmethod
    def clear(self) -> None:
        """Make all keys and values zeros."""

    @abstractmethod
    def move(self, source: Sequence[int], first: int) -> None:
        """Copy the rows at ``source`` positions, ascending, to the positions from ``first`` <= ``source[0]`` on."""

    @abstractmethod
    def take(self, theirs: Slots, first: int, count: int) -> None:
        """Have the positions [first, count) of another text's; these must be empty, and have room."""

    def index(self, *ranges: tuple[int, int]) -> torch.Tensor:
        """The slots of positions [first, last) of each range, as an index tensor made on the slots' device."""
        parts = [torch.arange(first, last, device=self.device) for first, last in ranges]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).remainder_(self.size)


class ContiguousSlots(Slots):
    """``keys`` and ``values`` are [layers, 1, heads, size, dim]: one tensor each, so that a commit moves all layers.

    They grow up to ``limit`` slots; a ring wraps only once it has ``limit`` slots.
    """

    def __init__(self, spec: LayerSpec, layers: int, limit: int) -> None:
        self.window, self.limit, self.first, self.device = spec.window, limit, 0, spec.device
        self.size = min(limit, _START)
        shape = (layers, 1, spec.heads, self.size)
        self.keys = torch.empty(*shape, spec.key_dim, dtype=spec.dtype, device=spec.device)
        self.values = torch.empty(*shape, spec.value_dim, dtype=spec.dtype, device=spec.device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def slot_bytes(self) -> int:
        return self.nbytes // self.size

    def place(self, layer: int) -> tuple[int, ...]:
        """The addresses of keys and values, and the number of slots."""
        return device_copies.address(self.keys[layer]), device_copies.address(self.values[layer]), self.size

    def grow(self, size: int) -> None:
        """Grow to ``size`` slots; the contents of the old slots are kept."""
        grown = []
        for former in (self.keys, self.values):
            grown.append(former.new_empty(*former.shape[:3], size, former.shape[4]))
            grown[-1].narrow(3, 0, self.size).copy_(former)
        self.keys, self.values, self.size = *grown, size

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.window is None:
            keys, values = (store.narrow(3, first, last - first).clone() for store in (self.keys, self.values))
            return keys, values
        slots = self.index((first, last))
        return self.keys.index_select(3, slots), self.values.index_select(3, slots)

    def slices(self, first: int, count: int) -> tuple[Slices, Slices]:
        """Per layer, views [1, heads, count, dim] of keys and values from slot ``first`` on."""
        return self.keys.narrow(3, first, count).unbind(0), self.values.narrow(3, first, count).unbind(0)

    def fill(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._store(3, (self.keys, self.values), first, (keys, values))

    def write(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._store(2, (self.keys[layer], self.values[layer]), first, (keys, values))

    def _store(
        self, axis: int, stores: tuple[torch.Tensor, torch.Tensor], first: int, both: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        rows, slot = both[0].shape[axis], first % self.size
        slots = None if slot + rows <= self.size else self.index((first, first + rows))
        for store, given in zip(stores, both, strict=True):
            if slots is None:
                store.narrow(axis, slot, rows).copy_(given)
            else:
                store.index_copy_(axis, slots, given)

    def clear(self) -> None:
        self.keys.zero_()
        self.values.zero_()

    def move(self, source: Sequence[int], first: int) -> None:
        count = len(source)
        found = None if device_copies.is_apart(self.device) else library()
        if found is not None:
            wanted = (c_int64 * count)(*source)
            for store in (self.keys, self.values):
                bytes_each = store.shape[-1] * store.element_size()
                lists = store.shape[0] * store.shape[2]
                found.specdec_move(store.data_ptr(), lists, self.size, bytes_each, wanted, first, count)
            return
        # Each row moves down, so no row is overwritten before it is read. An index would cost a copy to the device.
        for new, old in enumerate(source, first):
            for store in (self.keys, self.values):
                store.select(3, new % self.size).copy_(store.select(3, old % self.size))

    def take(self, theirs: Slots, first: int, count: int) -> None:
        if not isinstance(theirs, ContiguousSlots):
            self.fill(first, *theirs.read(first, count))
            return
        both = ((self.keys, theirs.keys), (self.values, theirs.values))
        if not first:  # neither has turned
            for own, other in both:
                own.narrow(3, 0, count).copy_(other.narrow(3, 0, count))
            return
        here, there = (slots.index((first, count)) for slots in (self, theirs))
        for own, other in both:  # masked slots are read too, and what is in them must be numbers
            own.zero_().index_copy_(3, here, other.index_select(3, there))
