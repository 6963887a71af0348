"""Rows: a forward's rows as layers in torch read them: tensors, slots of keys and values, and masks.

Through them attention stores keys and values in the slots and reads them, so that no layer holds state. They are made
of a :class:`specdec.step.step_io.StepInput` when it is run, and are of no use afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.errors import TargetError
from specdec.native.types import CRows
from specdec.runners.native_attention import c_rows
from specdec.runners.visibility import Layout, slot_ranges
from specdec.step.state import LayerState, Views
from specdec.step.step_io import StepInput
from specdec.step.tree import ancestors

__all__ = ["Rows", "TextRows"]

_HOST = torch.device("cpu")


class TextRows:
    """One sequence's rows of a forward, their slots in its cache and their mask.

    Attributes:
        number: of the sequence among the forward's.
        cache: what is held of its text.
        length: committed tokens.
        first, last: the rows' range in the tree.
        begins, ends: their range among all rows of the forward.
        rows: how many there are.
        parents: [last] of the tree; None where it is one path.
        depths: [last] of the tree.
        device: where tokens and positions are read.
        backend: attention backend, see :mod:`specdec.runners.attention`.
    """

    def __init__(self, step: StepInput, number: int, device: torch.device | None, backend: str) -> None:
        begin, end = step.tree[number], step.tree[number + 1]
        self.begins, self.ends = step.starts[number], step.starts[number + 1]
        self.rows, self.last = self.ends - self.begins, end - begin
        self.cache, self.length, self.first = step.texts[number], step.lengths[number], self.last - self.rows
        self.parents = None if step.chain[number] else step.parents[begin:end]
        self.depths = step.depths[begin:end]
        self.number, self.device, self.backend = number, device or _HOST, backend
        self._step = step
        self._seen: dict[tuple[LayerState, torch.dtype], tuple[Views, torch.Tensor | None]] = {}
        self._layouts: dict[tuple[LayerState, torch.dtype], Layout] = {}
        self._windows: dict[tuple[LayerState, int], tuple[torch.Tensor, torch.Tensor | None]] = {}

    @property
    def tokens(self) -> torch.Tensor:
        """[1, T] the rows' token ids."""
        return torch.from_numpy(self._step.ids[None, self.begins : self.ends])

    @property
    def positions(self) -> torch.Tensor:
        """[1, T] the rows' positions in the text."""
        return torch.from_numpy(self.numbers[None, self.first :]).to(self.device)

    @property
    def numbers(self) -> npt.NDArray[np.int64]:
        """[last] positions of the tree's rows, on the host."""
        return self.length + self.depths.astype(np.int64)

    def places(self, device: torch.device) -> torch.Tensor:
        """[last] positions of the tree's rows."""
        if self.parents is None:
            return torch.arange(self.length, self.length + self.last, device=device)
        return torch.from_numpy(self.numbers).to(device)

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Store one layer's keys and values [1, heads, T, dim] in the slots of the rows."""
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
        found = self._seen.get((group, dtype))
        if found is None:
            span, mask = self.mask(group, dtype)
            found = self._seen[group, dtype] = group.views(*span), mask
        views, mask = found
        return *views[self.cache.index_in_group[layer]], mask

    def seen(self, keys: int, device: torch.device) -> torch.Tensor:
        """[T, keys] bool: which of the last ``keys`` rows of the tree each row sees."""
        if self.parents is None:
            closure = torch.ones(self.last, self.last, dtype=torch.bool, device=device).tril_()
        else:
            closure = torch.from_numpy(ancestors(self.parents)).to(device)
        return closure[self.first :, self.last - keys :]

    def window_slots(self, group: LayerState, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[W, T] the slots of each row and of the tokens before it, the row's last; and which of these are of no token.

        The latter is None where all are. The tokens before a row are its ancestors in the tree, then committed ones.
        """
        found = self._windows.get((group, width))
        if found is None:
            at = np.arange(self.length + self.first, self.length + self.last)
            every = [at]
            for _ in range(width - 1):
                before = at - 1
                if self.parents is not None:  # of which the root's is -1
                    above = self.length + self.parents[np.maximum(at - self.length, 0)]
                    before = np.where(at >= self.length, above, before)
                every.append(at := before)
            places = np.stack(every[::-1])
            slots = torch.from_numpy(places % group.size).to(group.device)
            lacking = torch.from_numpy(places < 0).to(group.device) if places.min() < 0 else None
            found = self._windows[group, width] = slots, lacking
        return found

    def mask(self, group: LayerState, dtype: torch.dtype) -> tuple[tuple[int, int], torch.Tensor | None]:
        """Slots [first, last) to attend over, and an additive mask [T, slots]; None where all rows see all slots."""
        layout = self.layout(group, dtype)
        tail, prefix = layout.tail, layout.prefix
        if layout.mask is None and not layout.causal and isinstance(tail, tuple):
            first = prefix[0][0] if prefix else tail[0]
            if not prefix or (len(prefix) == 1 and prefix[0][1] == tail[0]):
                return (first, tail[1]), None
        size = min(self.length + self.last, group.size)
        mask = torch.full((self.rows, size), -torch.inf, dtype=dtype, device=group.device)
        for first, last in prefix:
            mask[:, first:last] = 0
        seen = mask.new_zeros(self.rows, 1) if layout.mask is None else layout.mask
        if layout.causal:
            seen = mask.new_full((self.rows, self.rows), -torch.inf).triu_(1)
        mask[:, slice(*tail) if isinstance(tail, tuple) else tail] = seen
        return (0, size), mask

    def layout(self, group: LayerState, dtype: torch.dtype) -> Layout:
        """The slots to attend over in two parts: those that every row sees, and a tail that needs a mask."""
        found = self._layouts.get((group, dtype))
        if found is None:
            found = self._layouts[group, dtype] = self._layout(group, dtype)
        return found

    def _layout(self, group: LayerState, dtype: torch.dtype) -> Layout:
        length, end, tree = self.length, self.length + self.last, self.last
        device, window, own_depths = group.device, group.window, self.depths[self.first :]
        # The shallowest row sees committed keys from `edge` on, the deepest row from `common` on.
        edge = 0 if window is None else max(0, length + int(own_depths.min()) - window + 1)
        common = edge if window is None else min(length, max(0, length + int(own_depths.max()) - window + 1))
        prefix = slot_ranges(common, length, group.size)
        lone = self.parents is None and self.first == 0 and (window is None or tree <= window)
        if edge == common and lone:
            tail = slot_ranges(length, end, group.size)
            if len(tail) == 1:
                return Layout(prefix, tail[0], None, causal=self.rows > 1)
        hidden = (edge, max(edge, common))  # committed keys that only some rows see
        size = hidden[1] - edge + end - length
        visible = torch.ones(self.rows, size, dtype=torch.bool, device=device)
        if window is not None:
            own, places = self.positions.to(device)[0, :, None], self.places(device)
            visible = own - torch.cat((torch.arange(*hidden, device=device), places)) < window
        visible[:, size - tree :] &= self.seen(tree, device)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
        start = edge if edge < common else length
        pieces = slot_ranges(start, end, group.size) if edge == common or common == length else ()
        tail_slots = pieces[0] if len(pieces) == 1 else group.index(hidden, (length, end))
        return Layout(prefix, tail_slots, mask, causal=False)


class Rows:
    """The rows of a forward on a device, of all of its sequences.

    Args:
        step: the forward.
        device: where its layers read tokens and positions.
        backend: attention backend, see :mod:`specdec.runners.attention`.

    Attributes:
        rows: T.
        alone: whether they are of one sequence.
        start: position of the first row if all are at consecutive positions, else None.
        end: one more than the last position of a row, or further.
        parts: each sequence's rows.
    """

    kind: type[TextRows] = TextRows

    def __init__(self, step: StepInput, device: torch.device | None = None, backend: str = "auto") -> None:
        self.step, self.device, self.backend = step, device or _HOST, backend
        self.rows, self.end = step.rows, step.end
        self.alone = not step.starts[2:]
        self.start = step.lengths[0] + step.tree[1] - step.rows if self.alone and step.chain[0] else None
        self.parts: Sequence[TextRows] = [
            self.kind(step, number, self.device, backend) for number in range(len(step.texts))
        ]

    @property
    def there(self) -> Sequence[TextRows | None]:
        """Each sequence's rows where they are on a device of its own, so that what is there need not be sent again."""
        return [None] * len(self.step.texts)

    @property
    def tokens(self) -> torch.Tensor:
        """[1, T] the rows' token ids."""
        return torch.from_numpy(self.step.ids)[None]

    @cached_property
    def positions(self) -> torch.Tensor:
        """[1, T] the rows' positions in their texts."""
        parts = [part.numbers[part.first :] for part in self.parts]
        return torch.from_numpy(np.concatenate(parts)[None]).to(self.device)

    @cached_property
    def c_rows(self) -> tuple[CRows, Any]:
        """The same as the native library reads them, from when all of them are stored or have room."""
        return c_rows(self.step)

    def index(self, device: torch.device) -> torch.Tensor:
        """The rows with logits, which are some, as an index on a device."""
        rows = self.step.wanted.logits
        assert rows is not None
        if rows[-1] - rows[0] == len(rows) - 1:  # made there
            return torch.arange(int(rows[0]), int(rows[-1]) + 1, device=device)
        return torch.from_numpy(rows).to(device)

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> None:
        """Store one layer's keys and values [1, heads, T, dim] in the slots of the rows."""
        if self.alone:
            self.parts[0].store(keys, values, layer)
            return
        for part in self.parts:
            own = slice(part.begins, part.ends)
            part.store(keys[:, :, own], values[:, :, own], layer)
