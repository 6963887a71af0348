"""The cache of many texts in pages of 64 tokens, as vLLM's (Kwon et al. 2023, "PagedAttention"): memory follows texts.

A page holds the keys and values of 64 consecutive positions of one text, for all layers of one spec. Which page has
which positions is a list of addresses in the device's memory, one list per text and spec, which kernels read
(:mod:`specdec.runners.kernels.step`). A list never moves, so a text grows without a copy, and a recorded graph serves
all texts.

A page belongs to the caches that refer to it: Python's reference counts are the pages' reference counts. Texts with a
common beginning refer to the same full pages, which are never written again. A page of positions that have left a
sliding window is given back while its text goes on.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from threading import RLock
from typing import Any

import torch

from specdec.errors import CacheError
from specdec.step import device_copies
from specdec.step.state import Held, LayerSpec, LayerState, Piece, Views

__all__ = ["PAGE", "Page", "PagePool", "PagedSlots"]

PAGE = 64
"""Positions of a page: a multiple of the keys that attention sums at once."""

_PIECE = 1024 // PAGE  # pages that are allocated at once at least
_GROWTH = 4  # and this part of those that there are: few allocations, and little that is never used

_Frame = tuple[torch.Tensor, int]  # [layers, 2, heads, PAGE, dim], and its address


class Page:
    """A page in use; it goes back to its pool with the last reference to it.

    Attributes:
        tensor: [layers, 2, heads, PAGE, dim], keys and values.
        address: where it begins in the device's memory.
    """

    __slots__ = ("_pool", "address", "tensor")

    def __init__(self, pool: PagePool, frame: _Frame) -> None:
        self._pool, (self.tensor, self.address) = pool, frame

    def __del__(self) -> None:
        self._pool.give_back((self.tensor, self.address))


class PagePool:
    """The pages of all texts of a target, for the layers of one spec, on their device.

    Its memory grows by pieces of several pages, and what is held is never copied. Pages of ended texts are used again
    at once. When no page is in use, all memory goes back to torch's allocator.

    Args:
        spec: of each of the layers; keys and values have the same width.
        layers: how many layers there are.

    Attributes:
        shape: of a page, [layers, 2, heads, 64, dim]: keys and values.
        pages: pages that there are, in use or free.
        page_bytes: bytes of a page.
    """

    def __init__(self, spec: LayerSpec, layers: int) -> None:
        self.spec, self.pages = spec, 0
        self.shape = (layers, 2, spec.heads, PAGE, spec.key_dim)
        self.page_bytes = layers * 2 * spec.heads * PAGE * spec.key_dim * spec.dtype.itemsize
        self._free: list[_Frame] = []  # the last one is taken first
        self._lock = RLock()  # a page may be given back by any thread, and by the garbage collector in this one

    @property
    def used(self) -> int:
        """Pages in use."""
        return self.pages - len(self._free)

    @property
    def free_bytes(self) -> int:
        """Bytes of pages that are not in use."""
        return len(self._free) * self.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes

    def slots(self, *, capacity: int, rows: int) -> PagedSlots:
        """The slots of a text, which has no page yet."""
        return PagedSlots(self, self.spec.slots(capacity, rows), capacity + rows)

    def take(self, count: int) -> list[Page]:
        """Pages for one text; what is in them is undefined.

        Raises:
            CacheError: the device has no memory for them.
        """
        taken: list[Page] = []
        with self._lock:
            while len(taken) < count:
                try:
                    frame = self._free.pop()
                except IndexError:
                    self._grow(count - len(taken))
                else:
                    taken.append(Page(self, frame))
        return taken

    def give_back(self, frame: _Frame) -> None:
        """Have a page that is in no text any more."""
        with self._lock:
            self._free.append(frame)
            if not self.used:
                self._free, self.pages = [], 0

    def _grow(self, wanted: int) -> None:
        """Allocate at least ``wanted`` pages."""
        for count in (max(wanted, _PIECE, self.pages // _GROWTH), wanted):
            # Not even in inference mode, as they may be written outside of it later.
            with suppress(torch.OutOfMemoryError), torch.inference_mode(False):
                piece = torch.empty((count, *self.shape), dtype=self.spec.dtype, device=self.spec.device)
                frames = [(tensor, device_copies.address(tensor)) for tensor in piece.unbind(0)]
                self._free += reversed(frames)
                self.pages += count
                return
            gc.collect()  # texts that failed hang in their errors' tracebacks
            if self._free:
                return
        raise CacheError(
            f"{self.spec.device} has no memory left for {wanted} more pages of {PAGE} tokens' keys and values "
            f"({self.page_bytes} bytes each; {self.used} are in use): lower max_new_tokens, decode fewer sequences at "
            "once (batch, or --max-num-seqs), or forget cached prefixes"
        )


class PagedSlots(LayerState):
    """One text's slots in pages, for the layers of one spec; a slot's number is its position.

    Attributes:
        pages: page of the positions from 64 i on; None where none is held.
        addresses: the same on the device, int64; before the first held page that page's, as lengths are timed at which
            more is read. Its own address never changes.
    """

    def __init__(self, pool: PagePool, limit: int, size: int) -> None:
        self.window, self.limit, self.first, self.size = pool.spec.window, limit, 0, size
        self.device, self.pool, self.room, self.reserves = pool.spec.device, pool, sys.maxsize, True
        self.pages: list[Page | None] = []
        self.slot_bytes = pool.page_bytes // PAGE
        self._oldest = 0  # how many pages were given back, or never held
        with torch.inference_mode(False):
            self.addresses = torch.zeros(-(-size // PAGE), dtype=torch.int64, device=self.device)
        self._address = device_copies.address(self.addresses)

    @property
    def nbytes(self) -> int:
        return max(0, len(self.pages) - self.first // PAGE) * self.pool.page_bytes

    def place(self, layer: int) -> tuple[int, ...]:
        """Where the addresses are, and the numbers in a page ahead of a layer's."""
        heads, width = self.pool.spec.heads, self.pool.spec.key_dim
        return self._address, layer * 2 * heads * PAGE * width

    def grow(self, end: int) -> None:
        """Does nothing: pages are taken when they are needed."""

    def reserve(self, end: int) -> None:
        """Have pages for the positions [first, end), and none for earlier ones."""
        if self.window is not None:
            self.first = max(self.first, end - self.limit)
        oldest, wanted = self.first // PAGE, -(-end // PAGE)
        begin = max(len(self.pages), oldest)
        if wanted > begin:
            pages = self.pool.take(wanted - begin)
            if begin == oldest and self.first % PAGE:  # masked slots may be read, and what is in them must be numbers
                pages[0].tensor.zero_()
            self._put(begin, pages)
        held = self.pages[oldest]
        if oldest > self._oldest and held is not None:
            self.addresses[:oldest].fill_(held.address)
            self.pages[:oldest], self._oldest = [None] * oldest, oldest

    def _put(self, begin: int, pages: Sequence[Page]) -> None:
        """Have these pages from number ``begin`` on; pages that lie one after the other take one launch."""
        each = self.pool.page_bytes
        breaks = [n for n in range(1, len(pages)) if pages[n].address != pages[n - 1].address + each]
        for first, last in pairwise([0, *breaks, len(pages)]):
            start = pages[first].address
            own = self.addresses[begin + first : begin + last]
            torch.arange(start, start + (last - first) * each, each, out=own)
        self.pages += [None] * (begin - len(self.pages))
        self.pages[begin : begin + len(pages)] = pages

    def _parts(self, first: int, last: int) -> list[tuple[torch.Tensor | None, int, int]]:
        """The pages' tensors that hold [first, last), each with the first and last of its positions; one at least."""
        found = list[tuple[torch.Tensor | None, int, int]]()
        for number in range(first // PAGE, -(-last // PAGE)):
            page = self.pages[number] if number < len(self.pages) else None
            ends = max(first, number * PAGE), min(last, (number + 1) * PAGE)
            found.append((None if page is None else page.tensor, *ends))
        return found or [(None, first, last)]

    def parts(self, first: int, last: int) -> Iterator[Piece]:
        for tensor, begin, end in self._parts(first, last):
            both = self._slots(tensor, slice(None), begin, end)[:, None]
            yield begin, both[:, :, 0], both[:, :, 1]

    def views(self, first: int = 0, last: int | None = None) -> Views:
        """Copies, for what reads no pages."""
        return _Copies(self, first, len(self.pages) * PAGE if last is None else last)

    def copied(self, layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values [1, heads, n, dim]."""
        own = slice(layer, layer + 1)
        both = torch.cat([self._slots(tensor, own, *ends) for tensor, *ends in self._parts(first, last)], 3)
        return both[:, 0], both[:, 1]

    def _slots(self, tensor: torch.Tensor | None, layers: slice, first: int, last: int) -> torch.Tensor:
        """[layers, 2, heads, n, dim] these positions of a page; of one that is not held zeros."""
        if tensor is None:  # masked slots are read too, and what is in them must be numbers
            tensor = torch.zeros(self.pool.shape, dtype=self.pool.spec.dtype, device=self.device)
        return tensor[layers].narrow(3, first % PAGE, last - first)

    def fill(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.reserve(first + keys.shape[3])
        self._write(slice(None), first, keys[:, 0], values[:, 0])

    def write(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._write(layer, first, keys[0], values[0])

    def _write(self, layer: int | slice, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for tensor, begin, end in self._parts(first, first + keys.shape[-2]):
            assert tensor is not None
            for store, rows in ((tensor[layer, 0], keys), (tensor[layer, 1], values)):
                store.narrow(-2, begin % PAGE, end - begin).copy_(rows.narrow(-2, begin - first, end - begin))

    def clear(self) -> None:
        for page in self.pages:
            if page is not None:
                page.tensor.zero_()

    def move(self, source: Sequence[int], first: int) -> None:
        # Each row moves down, so no row is overwritten before it is read. An index would cost a copy to the device.
        for new, old in enumerate(source, first):
            (there, _, _), (here, _, _) = *self._parts(new, new + 1), *self._parts(old, old + 1)
            assert there is not None
            assert here is not None
            there.select(3, new % PAGE).copy_(here.select(3, old % PAGE))

    def take(self, held: Held, first: int, count: int) -> None:
        """Full pages are shared, and those tokens copied that fill no page."""
        self.first = first
        full = count // PAGE
        if isinstance(held, PagedSlots) and held.pool is self.pool and full > first // PAGE:
            shared = held.pages[first // PAGE : full]
            own = [page for page in shared if page is not None]
            if len(own) == len(shared):  # else another thread goes on with that text
                self._put(first // PAGE, own)
                first = full * PAGE
        if count > first:
            self.reserve(count)
            super().take(held, first, count)


class _Copies(Sequence[tuple[torch.Tensor, torch.Tensor]]):
    """Layers' keys and values of the positions [first, last), copied anew whenever they are read."""

    def __init__(self, slots: PagedSlots, first: int, last: int) -> None:
        self._slots, self._ends = slots, (first, last)

    def __len__(self) -> int:
        return self._slots.pool.shape[0]

    def __getitem__(self, layer: Any) -> Any:
        return self._slots.copied(layer, *self._ends)
