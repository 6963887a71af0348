"""Block: one sequence's rows of a forward, their slots in the cache and their mask.

Decoder layers get a block as their cache. Through it the attention function stores keys and values in the slots and
reads them. So neither layers nor globals hold state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.errors import TargetError
from specdec.step import device_copies
from specdec.step.cache import KVCache
from specdec.step.pages import PagedSlots
from specdec.step.slots import ContiguousSlots, Slices, Slots
from specdec.step.tree import Draft, ancestors
from specdec.step.visibility import Layout, bucket, slot_ranges

__all__ = ["MOST_REPLAYED", "Block", "Rows", "Shared"]

MOST_REPLAYED = 128  # rows; with more rows a device computes for longer than their kernels take to launch


class Rows(ABC):
    """The rows of one forward: one sequence's (:class:`Block`), or several sequences' (:class:`Batch`).

    Attributes:
        rows: T.
        start: position of the first row if the rows are at consecutive positions, else None.
        end: one more than the last position of a row.
        backend: attention backend, see :mod:`specdec.runners.attention`.
        again: whether such rows come again and again, so that a recorded graph of their forward pays.
        sent: arrays on a device, among them "step", which kernels read; see :class:`Block`.
        attended: how many attention calls have read the rows' mask.
    """

    attended: int = 0
    rows: int
    start: int | None
    end: int
    backend: str
    again: bool
    sent: dict[str, torch.Tensor]

    @property
    @abstractmethod
    def shapes(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays of "step" on the host."""

    @property
    @abstractmethod
    def ids(self) -> Sequence[int]:
        """The rows' tokens on the host. Reading a :class:`specdec.step.device_copies.Later` waits for the device."""

    @property
    @abstractmethod
    def late(self) -> bool:
        """Whether a device may still be computing tokens."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[tuple[Block, int, int]]:
        """The blocks, each with the range [first, last) of its rows among all rows."""

    @property
    @abstractmethod
    def tokens(self) -> torch.Tensor:
        """[1, T] the rows' token ids."""

    @property
    @abstractmethod
    def positions(self) -> torch.Tensor:
        """[1, T] the rows' positions in their texts."""

    def index(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        """Row numbers, ascending, as an index tensor on a device."""
        if device_copies.is_apart(device) and rows[-1] - rows[0] == len(rows) - 1:
            return torch.arange(rows[0], rows[-1] + 1, device=device)  # made there
        return torch.tensor(rows, device=device)

    @abstractmethod
    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Store one layer's keys and values [1, heads, T, dim] in the slots of the rows."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``update`` of transformers' caches, which decoder layers call; returns the rows' own keys and values.

        Keys and values are stored when they reach the attention function instead. Some models compress what they give
        to a cache and expand what it returns (multi-head latent attention); attention reads the same in all models.
        """
        return keys, values


@dataclass(slots=True, eq=False)
class Shared:
    """A block's part of the arrays that a batch copied to a device.

    Attributes:
        views: the batch's arrays. Those that only this block has are under its number and their name.
        number: the block's number in the batch.
        first: its first row among the batch's rows.
        stacked: the arrays of ``step`` for all sequences, on the host; empty where each block has its own.
    """

    views: device_copies.Views
    number: int
    first: int
    stacked: Mapping[str, npt.NDArray[Any]]

    def of(self, block: Block) -> device_copies.Views:
        """The block's own arrays."""
        own, places = {}, {}
        arrays = block.arrays if self.stacked else {"step": device_copies.packed(block.shapes), **block.arrays}
        for name, array in arrays.items():
            numbered = f"{self.number} {name}"
            if numbered in self.views:
                own[name], places[name] = array, self.views.places[numbered]
            elif name in self.views:  # one array for all rows, of which the block has its part
                own[name], places[name] = array, self.views.places[name] + array.itemsize * self.first
        return device_copies.Views(self.views.buffer, own, places)

    def step(self) -> dict[str, torch.Tensor]:
        """The block's ``step``."""
        every = device_copies.views(self.views["step"], self.stacked)
        return {name: array[self.number] for name, array in every.items()}


class Block(Rows):
    """Rows ``first`` .. ``first + T`` of a step tree.

    Args:
        cache: the sequence's cache; row i writes to slot ``cache.length + i``.
        tokens: the T rows' token ids; a :class:`specdec.step.device_copies.Later` is not waited for.
        parents: parents of *all* the tree's rows up to the last of the block, or None for a chain.
        depths: depths of the same rows, or None for a chain.
        first: row of the tree that the block starts with; earlier rows are in their slots already.
        device: device of the embedding.
        backend: attention backend, see :mod:`specdec.runners.attention`.
        more: further arrays, int64 or bool, to be copied to the device with the rows; ``sent`` holds the copies.
        again: see :class:`Rows`.

    What goes to a device is made when it is first read, as a batch makes most of it for all its blocks at once.

    Attributes:
        step: the arrays that kernels on a device read in place of arguments: ``counts`` [3] holds the number of tokens
            before the tree, of the tree's rows before this block, and of the block's rows; ``table`` is the cache's.
            For a tree, or where rows come ``again``, also ``draws`` [2] and, padded to buckets, the positions
            ``places`` [K] of all the tree's rows and ``closure`` [T, K], whether a row sees another. A chain's earlier
            rows count as tokens. Where rows come ``again``, also ``tokens`` [T], zeros where a device still computes
            them, and ``above`` [T]: one more than each row's parent, 0 where the row cannot be accepted. The root has 1
            where the step ``decides``, else all have 0.
        shapes: the same arrays on the host.
        apart: whether the device has its own memory.
        shared: the block's part of what a batch copied; None where none has.
        decides: whether a recorded step of these rows, a whole draft, may decide by ``match`` what is accepted, from
            its own argmax or draws.
        moved: whether a recorded step did so, and moved the keys and values of the accepted rows together.
        probes: rows that are never accepted.
        draws: what the draws of all rows follow from (``Noise.draws_of``), for kernels on a device; zeros where no row
            has one.
        draw: temperature and key (``Noise.key``) of the first row's draw, which a runner may make together with the
            logits; None where no draw is needed.
    """

    decides: bool = False
    moved: bool = False
    probes: Collection[int] = ()
    ids: Sequence[int] = ()
    draw: tuple[float, int] | None = None
    draws: tuple[int, int] = (0, 0)

    def __init__(
        self,
        cache: KVCache,
        tokens: Sequence[int],
        *,
        parents: Sequence[int] | None = None,
        depths: Sequence[int] | None = None,
        first: int = 0,
        device: torch.device | None = None,
        backend: str = "auto",
        more: Mapping[str, npt.NDArray[Any]] | None = None,
        again: bool = True,
    ) -> None:
        self.cache = cache
        self.length = cache.length
        self.first = first
        self.ids = tokens
        self.rows = len(tokens)
        self.backend = backend
        self.parents = parents
        last = first + self.rows
        cache.reserve(self.length + last)
        self.depths = range(last) if depths is None else depths
        self.deepest = last - 1 if depths is None else max(depths[first:last])
        self.start = self.length + first if parents is None else None
        self.end = self.length + self.deepest + 1
        self.device = device
        self._grown = cache.grown
        self.again = again and self.rows <= MOST_REPLAYED
        self.apart = device_copies.is_apart(device)
        self.more = more or {}
        self._sent: dict[str, torch.Tensor] | None = None
        self.shared: Shared | None = None
        self._seen: dict[int, tuple[tuple[int, int], Slices, Slices]] = {}
        self._layouts: dict[tuple[int, torch.dtype], Layout] = {}
        self._masks: dict[tuple[int, torch.dtype], tuple[tuple[int, int], torch.Tensor | None]] = {}

    @classmethod
    def of(
        cls,
        draft: Draft,
        cache: KVCache,
        device: torch.device | None,
        backend: str = "auto",
        more: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> Block:
        """The block of a whole draft."""
        parents, depths = (None, None) if draft.is_chain else (draft.parents, draft.depths)
        return cls(cache, draft.tokens, parents=parents, depths=depths, device=device, backend=backend, more=more)

    @property
    def sent(self) -> dict[str, torch.Tensor]:
        """Arrays on a device with its own memory, copied at the first access unless a batch has copied them."""
        if self._sent is None:
            sent: dict[str, torch.Tensor] = {}
            if self.shared is not None:
                sent = self.shared.of(self)
            elif self.device and self.apart:
                sent = device_copies.copy_in({"step": device_copies.packed(self.shapes), **self.arrays}, self.device)
            if self.apart and type(self.ids) is device_copies.Later:
                sent["tokens"] = self.ids.tensor[None].to(self.device)
            self._sent = sent
        return self._sent

    @sent.setter
    def sent(self, arrays: dict[str, torch.Tensor]) -> None:
        self._sent = arrays

    @property
    def is_sent(self) -> bool:
        """Whether the arrays are on the device already, or none go there."""
        return not self.apart or self._sent is not None or self.shared is not None

    @cached_property
    def step(self) -> dict[str, torch.Tensor]:
        """The arrays that kernels read; empty on the CPU until :meth:`where` is called."""
        if not self.apart:
            return {}
        if self.shared is not None and self.shared.stacked:
            return self.shared.step()
        return device_copies.views(self.sent["step"], self.shapes)

    @cached_property
    def shapes(self) -> dict[str, npt.NDArray[Any]]:
        return self._step(self._places) if self.apart else {}

    @cached_property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that go to a device with these rows, but for ``step``."""
        if self.again:  # positions and tokens are parts of ``step``
            return {**self.more}
        arrays: dict[str, npt.NDArray[Any]] = {"positions": self._places[None, self.first :]}
        if type(self.ids) is not device_copies.Later:
            arrays["tokens"] = np.array([self.ids], dtype=np.int64)
        return {**arrays, **self.more}

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        """Positions of the tree's rows up to the block's last one."""
        last = self.first + self.rows
        if self.parents is None:
            return np.arange(self.length, self.length + last, dtype=np.int64)
        return self.length + np.array(self.depths[:last], dtype=np.int64)

    def _step(self, every: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """The arrays of ``step``, on the host; ``every``: positions of all the tree's rows."""
        before = 0 if self.parents is None else self.first
        known, size = self.length + self.first - before, before + self.rows
        arrays: dict[str, npt.NDArray[Any]] = {
            "counts": np.array([known, before, self.rows], dtype=np.int64),
            "table": self.cache.table,
        }
        if self.parents is None and not self.again:
            return arrays
        arrays["draws"] = np.array(self.draws, dtype=np.int64)
        if self.again:
            arrays["tokens"] = np.zeros(bucket(self.rows), dtype=np.int64)
            if type(self.ids) is not device_copies.Later:
                arrays["tokens"][: self.rows] = self.ids
            arrays["above"] = self._above()
        arrays["places"] = np.zeros(bucket(size), dtype=np.int64)
        arrays["places"][:size] = every[self.first - before :]
        if self.parents is None:
            arrays["closure"] = _chain_closure(size)
        else:
            arrays["closure"] = np.zeros((bucket(self.rows), bucket(size)), dtype=np.bool_)
            arrays["closure"][: self.rows, :size] = ancestors(self.parents[:size])[before:]
        return arrays

    def _above(self) -> npt.NDArray[np.int64]:
        """See ``step``."""
        above = np.zeros(bucket(self.rows), dtype=np.int64)
        if self.decides:
            above[: self.rows] = range(self.rows) if self.parents is None else np.array(self.parents) + 1
            above[[*self.probes]] = 0
            above[0] = 1
        return above

    def where(self) -> dict[str, torch.Tensor]:
        """The arrays of ``step``, for kernels that are about to run.

        Raises:
            TargetError: see :meth:`check_place`.
        """
        self.check_place()
        if not self.step:
            self.shapes = self._step(self._places)
            copied = device_copies.copy_in(self.shapes, self.device or torch.device("cpu"))
            self.step = {name: copied[name] for name in self.shapes}
        return self.step

    def check_place(self) -> None:
        """Nothing, where the cache is where it was.

        Raises:
            TargetError: it has moved since; its former addresses would be written to.
        """
        if self._grown != self.cache.grown:
            raise TargetError(
                f"the cache grew {self.cache.grown - self._grown} times after a block of {self.rows} rows was made, "
                "so its addresses are invalid; make a block right before it is run"
            )

    def index(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        """As :meth:`Rows.index`; rows that were given as ``more["rows"]`` are on the device already."""
        if "rows" in self.sent and np.array_equal(self.more["rows"], rows):
            return self.sent["rows"].to(device)
        return super().index(rows, device)

    @property
    def late(self) -> bool:
        return type(self.ids) is device_copies.Later

    @property
    def parts(self) -> Sequence[tuple[Block, int, int]]:
        return ((self, 0, self.rows),)

    @property
    def tokens(self) -> torch.Tensor:
        if "tokens" in self.sent:
            return self.sent["tokens"]
        return self.step["tokens"][None, : self.rows] if "tokens" in self.step else torch.tensor([[*self.ids]])

    @cached_property
    def positions(self) -> torch.Tensor:
        if "positions" in self.sent:
            return self.sent["positions"]
        if "places" in self.step:
            before = 0 if self.parents is None else self.first
            return self.step["places"][None, before : before + self.rows]
        depths = self.depths[self.first : self.first + self.rows]
        return torch.tensor([[self.length + depth for depth in depths]], device=self.device)

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        slots = self.cache.keys[layer].dtype
        if keys.dtype is not slots:  # writing would round the keys
            raise TargetError(
                f"layer {layer} computes keys in {keys.dtype}, and did so in {slots} when its target was made: the "
                "model was cast since; make a new engine for it"
            )
        self.cache.write(layer, keys, values, self.length + self.first)

    def visible(self, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values [1, heads, slots, dim] that a layer's rows may see, and the mask over them."""
        group = self.cache.group_of[layer]
        span, mask = self.mask(group, dtype)
        place = self.cache.index_in_group[layer]
        if isinstance(group, PagedSlots):  # a copy, so it is made behind each layer's storing
            return *group.of_layer(place, *span), mask
        found = self._seen.get(id(group))
        if found is None:
            assert isinstance(group, ContiguousSlots)
            found = self._seen[id(group)] = (span, *group.slices(span[0], span[1] - span[0]))
        return found[1][place], found[2][place], mask

    def seen(self, keys: int, device: torch.device) -> torch.Tensor:
        """[T, keys] bool: which of the last ``keys`` rows of the tree each row sees."""
        last = self.first + self.rows
        if self.parents is None:
            closure = torch.ones(last, last, dtype=torch.bool, device=device).tril_()
        elif "closure" in self.step:
            return self.step["closure"][: self.rows, last - keys : last].to(device)
        else:
            closure = torch.from_numpy(ancestors(self.parents[:last])).to(device)
        return closure[self.first :, last - keys :]

    def mask(self, group: Slots, dtype: torch.dtype) -> tuple[tuple[int, int], torch.Tensor | None]:
        """Slots [first, last) to attend over, and an additive mask [T, slots]; None where all rows see all slots."""
        key = (id(group), dtype)
        if key not in self._masks:
            self._masks[key] = self._mask(group, dtype)
        return self._masks[key]

    def _mask(self, group: Slots, dtype: torch.dtype) -> tuple[tuple[int, int], torch.Tensor | None]:
        layout = self.layout(group, dtype)
        tail, prefix = layout.tail, layout.prefix
        if layout.mask is None and not layout.causal and isinstance(tail, tuple):
            first = prefix[0][0] if prefix else tail[0]
            if not prefix or (len(prefix) == 1 and prefix[0][1] == tail[0]):
                return (first, tail[1]), None
        size = min(self.length + self.first + self.rows, group.size)
        mask = torch.full((self.rows, size), -torch.inf, dtype=dtype, device=group.device)
        for first, last in prefix:
            mask[:, first:last] = 0
        seen = mask.new_zeros(self.rows, 1) if layout.mask is None else layout.mask
        if layout.causal:
            seen = mask.new_full((self.rows, self.rows), -torch.inf).triu_(1)
        mask[:, slice(*tail) if isinstance(tail, tuple) else tail] = seen
        return (0, size), mask

    def layout(self, group: Slots, dtype: torch.dtype) -> Layout:
        """The slots to attend over in two parts: those that every row sees, and a tail that needs a mask."""
        key = (id(group), dtype)
        if key not in self._layouts:
            self._layouts[key] = self._layout(group, dtype)
        return self._layouts[key]

    def _layout(self, group: Slots, dtype: torch.dtype) -> Layout:
        length, end, tree = self.length, self.length + self.first + self.rows, self.first + self.rows
        device, window = group.device, group.window
        # The shallowest row sees committed keys from `edge` on, the deepest row from `common` on.
        edge = 0 if window is None else max(0, length + min(self.depths[self.first :]) - window + 1)
        common = edge if window is None else min(length, max(0, length + self.deepest - window + 1))
        prefix = slot_ranges(common, length, group.size)
        lone = self.parents is None and self.first == 0 and (window is None or self.deepest < window)
        if edge == common and lone:
            tail = slot_ranges(length, end, group.size)
            if len(tail) == 1:
                return Layout(prefix, tail[0], None, causal=self.rows > 1)
        hidden = (edge, max(edge, common))  # committed keys that only some rows see
        size = hidden[1] - edge + end - length
        visible = torch.ones(self.rows, size, dtype=torch.bool, device=device)
        own = self.positions.to(device)[0, :, None]
        if window is not None:
            if self.parents is None:
                places = torch.arange(length, end, device=device)
            elif "places" in self.step:
                places = self.step["places"][:tree].to(device)
            else:
                places = torch.tensor([length + depth for depth in self.depths[:tree]], device=device)
            visible = own - torch.cat((torch.arange(*hidden, device=device), places)) < window
        visible[:, size - tree :] &= self.seen(tree, device)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        start = edge if edge < common else length
        pieces = slot_ranges(start, end, group.size) if edge == common or common == length else ()
        tail_slots = pieces[0] if len(pieces) == 1 else group.index(hidden, (length, end))
        return Layout(prefix, tail_slots, mask, causal=False)


@lru_cache(maxsize=MOST_REPLAYED)
def _chain_closure(rows: int) -> npt.NDArray[np.bool_]:
    """[rows, rows] of a chain, whether a row sees another, padded to buckets."""
    closure = np.zeros((bucket(rows), bucket(rows)), dtype=np.bool_)
    closure[:rows, :rows] = np.tri(rows, dtype=np.bool_)
    closure.flags.writeable = False
    return closure
