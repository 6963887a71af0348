"""Block: the rows of one forward, where they stand in the cache and what each of them sees.

A block is also what the decoder layers get as their cache: ``update`` stores a layer's keys and values, and the
attention function reads them back from the slots through the same block. So no layer holds state, and no global does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec import copies
from specdec.cache import KVCache, Slices, Slots
from specdec.draft import Draft, ancestors

__all__ = ["Block", "Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Which slots of one group of layers a block reads, split into what all rows see and what some see.

    Attributes:
        prefix: slot ranges [first, last) that every row sees.
        tail: slots with a mask: the window's edge, then the tree. A range where they are contiguous, else an index.
        mask: [T, tail] additive, 0 or -inf; None where every row sees the whole tail, or ``causal`` says it.
        causal: the tail is the block's own chain, row i seeing the tail's first i + 1 keys.
    """

    prefix: tuple[tuple[int, int], ...]
    tail: tuple[int, int] | torch.Tensor
    mask: torch.Tensor | None
    causal: bool


class Block:
    """Rows ``first`` .. ``first + T`` of a step tree, on their way through the layers.

    Args:
        cache: where their keys and values go, at positions ``cache.length + row``.
        tokens: the T rows' token ids.
        parents: of *all* the tree's rows up to the last of the block, or None for a chain.
        depths: of the same rows, or None for a chain.
        first: row of the tree that the block starts with; earlier rows are in their slots already.
        device: where the embedding lives.
        backend: attention backend, see :mod:`specdec.attention`.
        more: arrays, int64 or bool, that somebody needs on the device with the rows; ``sent`` has them there.
    """

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
    ) -> None:
        self.cache = cache
        self.length = cache.length
        self.first = first
        self.rows = len(tokens)
        self.backend = backend
        self.parents = parents
        last = first + self.rows
        cache.reserve(self.length + last)
        self.depths = range(last) if depths is None else depths
        self.deepest = max(self.depths[first:last])
        self._device = device
        self.sent: dict[str, torch.Tensor] = {}
        if copies.is_apart(device):
            assert device is not None
            self._more = more or {}
            self.sent = copies.copy_in(self._arrays(tokens), device)
            self.tokens = self.sent["tokens"]
        else:
            self.tokens = torch.tensor([tokens])  # [1, T]
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
        if draft.is_chain:
            return cls(cache, draft.tokens, device=device, backend=backend, more=more)
        parents, depths = draft.parents, draft.depths
        return cls(cache, draft.tokens, parents=parents, depths=depths, device=device, backend=backend, more=more)

    def _arrays(self, tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """All that a forward needs on its device: rows, where they stand, and for a tree what they see."""
        last = self.first + self.rows
        arrays: dict[str, npt.NDArray[Any]] = {
            "tokens": np.array([tokens], dtype=np.int64),
            "places": self.length + np.array(self.depths[:last], dtype=np.int64),  # of all the tree's rows
            **self._more,
        }
        arrays["positions"] = arrays["places"][None, self.first :]
        if self.parents is not None:
            arrays["closure"] = ancestors(self.parents[:last])
        return arrays

    def index(self, rows: Sequence[int], device: torch.device) -> torch.Tensor:
        """Rows of the block as an index on a device; those that came as ``more["rows"]`` are there already."""
        if "rows" in self.sent and np.array_equal(self._more["rows"], rows):
            return self.sent["rows"].to(device)
        if copies.is_apart(device) and rows[-1] - rows[0] == len(rows) - 1:
            return torch.arange(rows[0], rows[-1] + 1, device=device)
        return torch.tensor(rows, device=device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """[1, T] where the rows stand in the text."""
        if "positions" in self.sent:
            return self.sent["positions"]
        depths = self.depths[self.first : self.first + self.rows]
        return torch.tensor([[self.length + depth for depth in depths]], device=self._device)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one layer's keys and values [1, heads, T, dim]; the signature is that of transformers' caches."""
        self.cache.write(layer, keys, values, self.length + self.first)
        return keys, values

    def visible(self, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys and values [1, heads, slots, dim] that the rows of a layer may see, and the mask over them."""
        group = self.cache.group_of[layer]
        span, mask = self.mask(group, dtype)
        found = self._seen.get(id(group))
        if found is None:
            found = self._seen[id(group)] = (span, *group.slices(span[0], span[1] - span[0]))
        place = self.cache.index_in_group[layer]
        return found[1][place], found[2][place], mask

    def seen(self, keys: int, device: torch.device) -> torch.Tensor:
        """[T, keys] bool: which of the last ``keys`` rows of the tree each row sees."""
        last = self.first + self.rows
        if self.parents is None:
            closure = torch.ones(last, last, dtype=torch.bool, device=device).tril_()
        elif "closure" in self.sent:
            closure = self.sent["closure"].to(device)
        else:
            closure = torch.from_numpy(ancestors(self.parents[:last])).to(device)
        return closure[self.first :, last - keys :]

    def mask(self, group: Slots, dtype: torch.dtype) -> tuple[tuple[int, int], torch.Tensor | None]:
        """Slots [first, last) to attend over, and one additive mask [T, slots] over them (None: all is seen)."""
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
        mask = torch.full((self.rows, size), -torch.inf, dtype=dtype, device=group.keys.device)
        for first, last in prefix:
            mask[:, first:last] = 0
        seen = mask.new_zeros(self.rows, 1) if layout.mask is None else layout.mask
        if layout.causal:
            seen = mask.new_full((self.rows, self.rows), -torch.inf).triu_(1)
        mask[:, slice(*tail) if isinstance(tail, tuple) else tail] = seen
        return (0, size), mask

    def layout(self, group: Slots, dtype: torch.dtype) -> Layout:
        """The same keys in two parts: what every row sees, and the tail that needs a mask."""
        key = (id(group), dtype)
        if key not in self._layouts:
            self._layouts[key] = self._layout(group, dtype)
        return self._layouts[key]

    def _layout(self, group: Slots, dtype: torch.dtype) -> Layout:
        length, end, tree = self.length, self.length + self.first + self.rows, self.first + self.rows
        device, window = group.keys.device, group.window
        # The shallowest row sees committed keys from `edge` on, the deepest row from `common` on.
        edge = 0 if window is None else max(0, length + min(self.depths[self.first :]) - window + 1)
        common = edge if window is None else min(length, max(0, length + self.deepest - window + 1))
        prefix = _ranges(common, length, group.size)
        lone = self.parents is None and self.first == 0 and (window is None or self.deepest < window)
        if edge == common and lone:
            tail = _ranges(length, end, group.size)
            if len(tail) == 1:
                return Layout(prefix, tail[0], None, causal=self.rows > 1)
        hidden = (edge, max(edge, common))  # committed keys that only some rows see
        size = hidden[1] - edge + end - length
        visible = torch.ones(self.rows, size, dtype=torch.bool, device=device)
        own = self.positions.to(device)[0, :, None]
        if window is not None:
            if "places" in self.sent:
                places = self.sent["places"].to(device)
            else:
                places = torch.tensor([length + depth for depth in self.depths[:tree]], device=device)
            visible = own - torch.cat((torch.arange(*hidden, device=device), places)) < window
        visible[:, size - tree :] &= self.seen(tree, device)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        start = edge if edge < common else length
        pieces = _ranges(start, end, group.size) if edge == common or common == length else ()
        tail_slots = pieces[0] if len(pieces) == 1 else group.index(hidden, (length, end))
        return Layout(prefix, tail_slots, mask, causal=False)


def _ranges(first: int, last: int, size: int) -> tuple[tuple[int, int], ...]:
    """The slot ranges of positions [first, last) on a ring of ``size``: none, one, or two where it wraps."""
    if first >= last:
        return ()
    start, stop = first % size, (last - 1) % size + 1
    return ((start, stop),) if start < stop else ((start, size), (0, stop))
