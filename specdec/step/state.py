"""State: what a text's layers remember of it, one protocol whatever it is.

A cache (:mod:`specdec.step.cache`) has one state for all layers of one spec: keys and values in slots that lie beside
each other, in a ring, or in pages; the inputs of a convolution, which are a ring of one head without values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Held", "LayerSpec", "LayerState", "Piece", "Views"]

Views = Sequence[tuple[torch.Tensor, torch.Tensor]]
Piece = tuple[int, torch.Tensor, torch.Tensor]
"""Keys and values [layers, 1, heads, n, dim] of the positions from the number on."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's cache: ``heads`` key/value heads of ``key_dim`` and ``value_dim``; ``window`` None = all keys.

    Of a convolution over W positions the keys are its inputs, in a window of W and without values.
    """

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


class Held(Protocol):
    """What is known of a text in the layers of one spec: by its own state, or by nodes of a prefix tree.

    Attributes:
        first: the first position that is held.
    """

    first: int

    def parts(self, first: int, last: int) -> Iterable[Piece]:
        """What is held of the positions [first, last), in order; perhaps views."""


class LayerState(ABC):
    """What all layers of one spec remember of one text: something for each position p, in slot p mod ``size``.

    Attributes:
        window: of the spec.
        device: of the tensors.
        size: slots that there are.
        limit: most positions that are held at once.
        first: the first position that is held. Earlier ones were overwritten or given back, or never written, as in a
            ring that was filled from another one.
        room: positions below it have slots; those above need ``grow``, after which addresses are others.
        reserves: whether ``reserve`` does anything, as it is called for every forward.
        slot_bytes: bytes of one token's keys and values.
    """

    window: int | None
    device: torch.device
    size: int
    limit: int
    first: int
    room: int
    reserves: bool
    slot_bytes: int

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    @abstractmethod
    def place(self, layer: int) -> tuple[int, ...]:
        """What kernels read to find a layer's keys and values, until slots move."""

    @abstractmethod
    def grow(self, end: int) -> None:
        """Have room for positions up to ``end``, which are not written yet."""

    @abstractmethod
    def reserve(self, end: int) -> None:
        """Rows up to position ``end``, for which there is room, are about to be written.

        Raises:
            CacheError: no memory is left for their pages.
        """

    @abstractmethod
    def views(self, first: int = 0, last: int | None = None) -> Views:
        """By layer keys and values [1, heads, n, dim] in the slots [first, last), or in all that there are.

        Of pages they are copies, made whenever a layer's are read.
        """

    @abstractmethod
    def parts(self, first: int, last: int) -> Iterable[Piece]:
        """Keys and values of the positions [first, last), in order; views where their slots lie beside each other."""

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of keys and values [layers, 1, heads, n, dim] of the positions [first, last)."""
        _, keys, values = zip(*self.parts(first, last), strict=True)
        return torch.cat(keys, 3), torch.cat(values, 3)

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

    def points(self, held: Held, most: int) -> int:
        """The largest n <= ``most`` so that a text may go on from n tokens with what is held of them; 0 for none."""
        # The next token, at position n, sees the window - 1 before it.
        return most if self.window is None or held.first <= max(0, most - self.window + 1) else 0

    def take(self, held: Held, first: int, count: int) -> None:
        """Have the positions [first, count) of a text; this state must be empty, and have room."""
        for start, keys, values in held.parts(first, count):
            self.fill(start, keys, values)

    def index(self, *ranges: tuple[int, int]) -> torch.Tensor:
        """The slots of positions [first, last) of each range, as an index tensor made on the slots' device."""
        parts = [torch.arange(first, last, device=self.device) for first, last in ranges]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).remainder_(self.size)
