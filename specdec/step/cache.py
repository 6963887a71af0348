"""KV cache: slots that grow with the text; rows are written behind the committed slots, accepted rows moved together.

The committed tokens fill slots [0, length). A forward of a step tree writes row i of the tree to slot ``length + i``,
which is scratch, whatever the row's depth. ``commit(path)`` then moves the accepted rows together, so that position and
slot agree again. Nothing else is ever undone.

A layer with a sliding window W keeps a ring of R slots, position p in slot p mod R. With R >= W + T - 1, T rows of one
forward overwrite dead keys only: the root at position n sees the W - 1 committed keys from n - W + 1 on, and these and
T rows fill R slots. A ring of exactly W slots would lose T - 1 live keys to rows that may be rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.errors import DraftError
from specdec.native.library import library
from specdec.step import device_copies

__all__ = ["KVCache", "LayerSpec", "Slots"]


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

    def slots(self, capacity: int, rows: int) -> int:
        """Slots that a text of ``capacity`` tokens needs with forwards of up to ``rows`` rows."""
        linear = capacity + rows
        return linear if self.window is None else min(linear, self.window + rows - 1)


class Slots:
    """The slots of all layers of one spec.

    ``keys`` and ``values`` are [layers, 1, heads, size, dim]: one tensor each, so that a commit moves all layers at
    once. They grow up to ``limit`` slots; a ring wraps only once it has ``limit`` slots.

    Attributes:
        first: the first position that is held. Earlier ones were overwritten, or never written, as in a ring that was
            filled from another one.
    """

    def __init__(self, spec: LayerSpec, layers: int, limit: int) -> None:
        self.window, self.limit, self.first = spec.window, limit, 0
        self.size = min(limit, _START)
        shape = (layers, 1, spec.heads, self.size)
        self.keys = torch.empty(*shape, spec.key_dim, dtype=spec.dtype, device=spec.device)
        self.values = torch.empty(*shape, spec.value_dim, dtype=spec.dtype, device=spec.device)

    def grow(self, size: int) -> None:
        """Grow to ``size`` slots; the contents of the old slots are kept."""
        grown = []
        for former in (self.keys, self.values):
            grown.append(former.new_empty(*former.shape[:3], size, former.shape[4]))
            grown[-1].narrow(3, 0, self.size).copy_(former)
        self.keys, self.values, self.size = *grown, size

    def slices(self, first: int, count: int) -> tuple[Slices, Slices]:
        """Per layer, views [1, heads, count, dim] of keys and values from slot ``first`` on."""
        return self.keys.narrow(3, first, count).unbind(0), self.values.narrow(3, first, count).unbind(0)

    def index(self, *ranges: tuple[int, int]) -> torch.Tensor:
        """The slots of positions [first, last) of each range, as an index tensor made on the slots' device."""
        parts = [torch.arange(first, last, device=self.keys.device) for first, last in ranges]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).remainder_(self.size)

    def move(self, source: Sequence[int], first: int) -> None:
        """Copy the rows at ``source`` positions, ascending, to the positions from ``first`` <= ``source[0]`` on."""
        count = len(source)
        found = None if device_copies.is_apart(self.keys.device) else library()
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


class KVCache:
    """Keys and values of one sequence for every layer of a target.

    Args:
        specs: one per layer; equal specs share tensors.
        capacity: most tokens that will ever be committed; memory grows with the committed tokens.
        rows: most rows of one forward, a prefill chunk included.

    Attributes:
        grown: how often the slots have moved; addresses read earlier are invalid then.
        written: positions below it may have been written, rejected rows included. ``first`` of each group of layers
            says which committed positions it still holds.
        described: a runner's own description of the slots' addresses; None once they have moved.
    """

    def __init__(self, specs: Sequence[LayerSpec], *, capacity: int, rows: int) -> None:
        self.length = 0
        self.capacity = capacity
        self.rows = rows
        self.grown = 0
        self.written = 0
        members: dict[LayerSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            members.setdefault(spec, []).append(layer)
        self.groups = [Slots(spec, len(layers), spec.slots(capacity, rows)) for spec, layers in members.items()]
        self._rings = [group for group in self.groups if group.window is not None]
        of_spec = dict(zip(members, self.groups, strict=True))
        self.group_of = [of_spec[spec] for spec in specs]
        self.index_in_group = [members[spec].index(layer) for layer, spec in enumerate(specs)]
        self._view()

    @staticmethod
    def most_bytes(specs: Sequence[LayerSpec], *, capacity: int, rows: int) -> int:
        """Bytes that such a cache may come to hold."""
        return sum(
            spec.slots(capacity, rows) * spec.heads * (spec.key_dim + spec.value_dim) * spec.dtype.itemsize
            for spec in specs
        )

    def _view(self) -> None:
        # Per layer its own [1, heads, size, dim] views, made once: slicing is most of what a tiny layer's cache costs.
        groups = list(zip(self.group_of, self.index_in_group, strict=True))
        self.keys = [group.keys[place] for group, place in groups]
        self.values = [group.values[place] for group, place in groups]
        self._room = min(
            (group.size for group in self.groups if group.size < group.limit), default=self.capacity + self.rows
        )
        self._table: npt.NDArray[np.int64] | None = None
        self.described: Any = None

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """[layers, 3] where each layer's keys and values are in memory, and its slots; until slots move."""
        if self._table is None:
            layers = zip(self.keys, self.values, strict=True)
            rows = [
                (device_copies.address(keys), device_copies.address(values), keys.shape[2]) for keys, values in layers
            ]
            self._table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return self._table

    def reserve(self, end: int) -> None:
        """Rows up to position ``end`` are about to be written; every block calls it for its rows, and every write."""
        if end <= self.written:
            return
        for ring in self._rings:
            ring.first = max(ring.first, end - ring.limit)
        self.grow(end)
        self.written = end  # last, as an interrupt may come anywhere

    def grow(self, end: int) -> None:
        """Have room for positions up to ``end``, which are not written yet."""
        if end <= self._room:
            return
        for group in self.groups:
            if group.size < min(end, group.limit):
                group.grow(min(group.limit, max(end, 2 * group.size)))
        self.grown += 1
        self._view()

    @property
    def nbytes(self) -> int:
        """Bytes held, all layers and devices."""
        return sum(g.keys.nbytes + g.values.nbytes for g in self.groups)

    @property
    def free(self) -> int:
        """Rows that the next forward may have."""
        return min(self.rows, self.capacity + self.rows - self.length)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Store ``keys`` and ``values`` [1, heads, T, dim] of one layer at positions [start, start + T)."""
        rows = keys.shape[2]
        self.reserve(start + rows)
        size = self.group_of[layer].size
        first = start % size
        if first + rows <= size:
            self.keys[layer].narrow(2, first, rows).copy_(keys)
            self.values[layer].narrow(2, first, rows).copy_(values)
        else:
            slots = self.group_of[layer].index((start, start + rows))
            self.keys[layer].index_copy_(2, slots, keys)
            self.values[layer].index_copy_(2, slots, values)

    def check(self, rows: int) -> None:
        """Raises DraftError where a forward of ``rows`` rows does not fit."""
        if rows > self.free:
            raise DraftError(
                f"draft has {rows} rows but {self.free} slots are free; propose at most `row_budget` rows, "
                f"or raise the engine's max_rows (now {self.rows})"
            )

    def commit(self, path: Sequence[int]) -> None:
        """Keep the tree rows ``path`` (ascending, from 0 on) as the next committed tokens; forget the other rows."""
        if path and path[-1] >= len(path):
            moved = next(place for place, row in enumerate(path) if place != row)
            source = [self.length + row for row in path[moved:]]
            for group in self.groups:
                group.move(source, self.length + moved)
        self.length += len(path)

    def take(self, former: KVCache, count: int) -> bool:
        """Have the first ``count`` tokens of another cache of the same specs, if it holds what is seen of them.

        Nothing is taken where a ring does not hold all that the next token sees. Where it holds more, more is taken, as
        far as there is room: a text that branches off a little earlier may go on from that. This cache must be empty.
        """
        starts = []
        for mine, theirs in zip(self.groups, former.groups, strict=True):
            # The next token, at position `count`, sees the window - 1 before it.
            seen = 0 if mine.window is None else max(0, count - mine.window + 1)
            if theirs.first > seen:
                return False
            starts.append(max(theirs.first, count - mine.limit))
        self.grow(count)
        for mine, theirs, first in zip(self.groups, former.groups, starts, strict=True):
            both = ((mine.keys, theirs.keys), (mine.values, theirs.values))
            if not first:  # neither has turned
                for own, other in both:
                    own.narrow(3, 0, count).copy_(other.narrow(3, 0, count))
                continue
            here, there = (slots.index((first, count)) for slots in (mine, theirs))
            for own, other in both:  # masked slots are read too, and what is in them must be numbers
                own.zero_().index_copy_(3, here, other.index_select(3, there))
        for mine, theirs, first in zip(self.groups, former.groups, starts, strict=True):
            if theirs.first > first:  # another thread goes on with that text, and wrote there meanwhile
                return False
            mine.first = first
        self.length = self.written = count
        return True
