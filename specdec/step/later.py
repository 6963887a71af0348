"""Later: tokens that a device may still be computing; torch is not needed to hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

__all__ = ["Later"]


class Later(Sequence[int]):
    """Integers that a device may still be computing. The first read waits for all of them.

    A forward embeds ``tensor`` on the device. ``known`` sets the integers if they were copied with something else.

    Args:
        tensor: int64 [N], of torch.
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._numbers: list[int] | None = None

    def known(self, numbers: list[int]) -> None:
        """Set the integers, which were copied already."""
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self.tensor)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...
    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if self._numbers is None:
            self._numbers = self.tensor.tolist()
        return self._numbers[at]
