"""KV cache: slots that grow with the text; rows are written behind the committed slots, accepted rows moved together.

A text's slots lie beside each other, or on a GPU in pages (:mod:`specdec.step.pages`).

The committed tokens fill slots [0, length). A forward of a step tree writes row i of the tree to slot ``length + i``,
which is scratch, whatever the row's depth. ``commit(path)`` then moves the accepted rows together, so that position and
slot agree again. Nothing else is ever undone.

A layer with a sliding window W keeps a ring of R slots, position p in slot p mod R. With R >= W + T - 1, T rows of one
forward overwrite dead keys only: the root at position n sees the W - 1 committed keys from n - W + 1 on, and these and
T rows fill R slots. A ring of exactly W slots would lose T - 1 live keys to rows that may be rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specdec.errors import DraftError
from specdec.native.types import place_of
from specdec.settings.copies import NotCopied
from specdec.step.pages import PAGE, PagePool
from specdec.step.slots import ContiguousSlots
from specdec.step.state import Held, LayerSpec, LayerState

__all__ = ["KVCache", "Known", "LayerSpec", "LayerState"]


class Known(Protocol):
    """What is known of a text: its cache, or nodes of a prefix tree. ``groups``: in the layers of each spec."""

    @property
    def groups(self) -> Sequence[Held]: ...


class KVCache(NotCopied):
    """Keys and values of one sequence for every layer of a target.

    Args:
        specs: one per layer; equal specs share tensors.
        capacity: most tokens that will ever be committed; memory grows with the committed tokens.
        rows: most rows of one forward, a prefill chunk included.
        pools: of which pages the slots are, by spec; None has each text's slots beside each other.

    Attributes:
        grown: how often the slots have moved; addresses read earlier are invalid then. Pages never move.
        keys, values: per layer [1, heads, slots, dim]; of pages copies, made when they are read.
        written: positions below it may have been written, rejected rows included. ``first`` of each group of layers
            says which committed positions it still holds.
        moved: a device has moved the rows together that it accepted, so that ``commit`` need not.
        listed: where ``list_slots`` has put its list; 0 once slots have moved.
    """

    instead = "a new cache of the same specs can take() its beginning"

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        *,
        capacity: int,
        rows: int,
        pools: Mapping[LayerSpec, PagePool] | None = None,
    ) -> None:
        self.length = 0
        self.capacity = capacity
        self.rows = rows
        self.grown = 0
        self.written = 0
        self.moved = False
        members: dict[LayerSpec, list[int]] = {}
        for layer, spec in enumerate(specs):
            members.setdefault(spec, []).append(layer)
        self.groups: list[LayerState] = [
            ContiguousSlots(spec, len(layers), spec.slots(capacity, rows))
            if pools is None
            else pools[spec].slots(capacity=capacity, rows=rows)
            for spec, layers in members.items()
        ]
        self._paged, self._reserving = pools is not None, [group for group in self.groups if group.reserves]
        of_spec = dict(zip(members, self.groups, strict=True))
        self.group_of = [of_spec[spec] for spec in specs]
        self.index_in_group = [members[spec].index(layer) for layer, spec in enumerate(specs)]
        self._view()

    @staticmethod
    def most_bytes(specs: Sequence[LayerSpec], *, capacity: int, rows: int) -> int:
        """Bytes that such a cache may come to hold."""
        return sum(spec.slots(capacity, rows) * spec.slot_bytes for spec in specs)

    @staticmethod
    def most_page_bytes(specs: Sequence[LayerSpec], *, capacity: int, rows: int, drafted: int) -> int:
        """The same of one in pages, behind whose text are at most ``drafted`` rows, as prompts are cut at their end.

        What is held of a window may begin and end in the middle of a page.
        """
        linear = -(-(capacity + drafted) // PAGE)
        sizes = ((spec, min(linear, -(-spec.slots(capacity, rows) // PAGE) + 1)) for spec in specs)
        return sum((linear if spec.window is None else pages) * PAGE * spec.slot_bytes for spec, pages in sizes)

    def _view(self) -> None:
        places = [] if self._paged else [*zip(self.group_of, self.index_in_group, strict=True)]
        views = [group.views()[number] for group, number in places]
        self.keys: Sequence[torch.Tensor] = _Copies(self, 0) if self._paged else [keys for keys, _ in views]
        self.values: Sequence[torch.Tensor] = _Copies(self, 1) if self._paged else [values for _, values in views]
        self._room = min((group.room for group in self.groups), default=self.capacity + self.rows)
        self._table: npt.NDArray[np.int64] | None = None
        self._list: npt.NDArray[np.int64] | None = None
        self.listed = 0

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """[layers, 3] where each layer's keys and values are in memory, and its slots; until slots move.

        Of a cache in pages [layers, 2] where the list of the pages' addresses is, and a layer's place in a page.
        """
        if self._table is None:
            places = zip(self.group_of, self.index_in_group, strict=True)
            rows = [group.place(number) for group, number in places]
            self._table = np.array(rows, dtype=np.int64).reshape(len(rows), -1 if rows else 3)
        return self._table

    def list_slots(self) -> int:
        """Where the native library reads each layer's keys, values, slots, their stride and the window, 0 for none."""
        places = zip(self.group_of, self.index_in_group, strict=True)
        rows = [(*group.place(number), group.size, group.window or 0) for group, number in places]
        self._list = np.array(rows, dtype=np.int64)
        self.listed = place_of(self._list)
        return self.listed

    def reserve(self, end: int) -> None:
        """Rows up to position ``end`` are about to be written; every forward calls it for its rows, and every write.

        Raises:
            CacheError: no memory is left for their pages.
        """
        if end <= self.written:
            return
        if end > self._room:
            self.grow(end)
        for group in self._reserving:
            group.reserve(end)
        self.written = end  # last, as an interrupt may come anywhere

    def grow(self, end: int) -> None:
        """Have room for positions up to ``end``, which are not written yet. Pages are taken when they are needed."""
        if end <= self._room:
            return
        for group in self.groups:
            group.grow(end)
        self.grown += 1
        self._view()

    @property
    def nbytes(self) -> int:
        """Bytes held, all layers and devices."""
        return sum(group.nbytes for group in self.groups)

    @property
    def free(self) -> int:
        """Rows that the next forward may have."""
        return min(self.rows, self.capacity + self.rows - self.length)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Store ``keys`` and ``values`` [1, heads, T, dim] of one layer at positions [start, start + T)."""
        if start + keys.shape[2] > self.written:
            self.reserve(start + keys.shape[2])
        self.group_of[layer].write(self.index_in_group[layer], start, keys, values)

    def check(self, rows: int) -> None:
        """Raises DraftError where a forward of ``rows`` rows does not fit."""
        if rows > self.free:
            raise DraftError(
                f"draft has {rows} rows but {self.free} slots are free; propose at most `row_budget` rows, "
                f"or raise the engine's max_rows (now {self.rows})"
            )

    def commit(self, path: Sequence[int]) -> None:
        """Keep the tree rows ``path`` (ascending, from 0 on) as the next committed tokens; forget the other rows.

        Where a device has ``moved`` them together already, perhaps with further rows, these are scratch.
        """
        moved, self.moved = self.moved, False
        if path and path[-1] >= len(path) and not moved:
            first = next(place for place, row in enumerate(path) if place != row)
            source = [self.length + row for row in path[first:]]
            for group in self.groups:
                group.move(source, self.length + first)
        self.length += len(path)

    def points(self, known: Known, most: int) -> int:
        """The largest n <= ``most`` so that a text may go on from the first n tokens of one that is known; 0 for none.

        That is where the next token's layers have what they read of these: all keys that a window sees.
        """
        pairs = [*zip(self.groups, known.groups, strict=True)]
        while most and (least := min((mine.points(theirs, most) for mine, theirs in pairs), default=most)) < most:
            most = least
        return most

    def take(self, known: Known, count: int) -> bool:
        """Have the first ``count`` tokens of a text of the same specs, if a text may go on from these.

        Of a ring more is taken than the next token sees, as far as it is there and there is room: a text that branches
        off a little earlier may go on from that. This cache must be empty.
        """
        if not count or self.points(known, count) < count:
            return False
        pairs = [*zip(self.groups, known.groups, strict=True)]
        starts = [max(theirs.first, count - mine.limit) for mine, theirs in pairs]
        self.grow(count)
        for (mine, theirs), first in zip(pairs, starts, strict=True):
            mine.take(theirs, first, count)
        for (mine, theirs), first in zip(pairs, starts, strict=True):
            if theirs.first > first:  # another thread goes on with that text, and wrote there meanwhile
                return False
            mine.first = first
        self.length = self.written = count
        return True


class _Copies(Sequence[torch.Tensor]):
    """Per layer a copy of the keys or of the values [1, heads, slots, dim] of a cache in pages: what is there of them.

    Kernels read pages where they are. This is for layers that cannot, as when their own modules run them.
    """

    def __init__(self, cache: KVCache, which: int) -> None:
        self._places, self._which = list(zip(cache.group_of, cache.index_in_group, strict=True)), which

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, layer: Any) -> Any:
        group, place = self._places[layer]
        return group.views()[place][self._which]
