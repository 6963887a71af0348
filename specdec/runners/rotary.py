"""Rotary positions: cosines and sines from the model's own module, computed once per position and looked up.

A module of transformers computes them again in every step, by some fifteen operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from specdec.errors import TargetError
from specdec.runners.rows import Rows

__all__ = ["Angles", "Rotary", "rope_depends_on_length", "rope_kinds", "rotate", "signed"]

Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # cosines, sines, sines with their first half negated


class Angles:
    """Rotary positions of a forward's rows, looked up at the first access.

    Attributes:
        cos: [T, d].
        sin: [T, d].
        signed_sin: [T, d] sines with their first half negated, for :func:`rotate`.
    """

    def __init__(self, rotary: Rotary, rows: Rows, hidden: torch.Tensor) -> None:
        self._rotary, self._rows, self._hidden = rotary, rows, hidden
        self._kinds: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        if not rotary.by_kind:
            self.cos, self.sin, self.signed_sin = rotary.look_up(rows, hidden)
            self._kinds[None] = self.cos, self.sin

    def of_kind(self, kind: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, d] for layers of a kind; None where all layers share them."""
        if kind not in self._kinds:
            self._kinds[kind] = self._rotary.compute(self._hidden, self._rows.positions, kind)
        return self._kinds[kind]


class Rotary:
    """A decoder's rotary module, with tables of its results.

    Args:
        module: ``module(hidden, positions)`` returns cosines and sines [1, T, d]; some modules also take the kind of
            attention, as their frequencies depend on it.
        config: the model's config; its ``rope_parameters`` tell whether a position is the same in every text.

    Attributes:
        module: as given.
        by_kind: whether positions differ by a layer's kind of attention.
        fixed: whether a position is the same in every text, so that the module is called once per position.
    """

    def __init__(self, module: Any, config: Any) -> None:
        self.module = module
        self.by_kind = "layer_type" in inspect.signature(module.forward).parameters
        self.fixed = not any(map(rope_depends_on_length, rope_kinds(config)))
        self._tables: dict[tuple[torch.device, torch.dtype, str | None], Table] = {}

    def of(self, rows: Rows, hidden: torch.Tensor) -> Angles:
        """The positions of a forward's rows, in the dtype and on the device of ``hidden``."""
        return Angles(self, rows, hidden)

    def look_up(self, rows: Rows, hidden: torch.Tensor) -> Table:
        """For each row, [T, d]: cosines, sines, and sines with their first half negated."""
        if not self.fixed:
            return self._table(hidden, rows.positions.to(hidden.device))
        table = self.whole(rows, hidden)
        if rows.start is not None:
            cos, sin, signed_sin = (values.narrow(0, rows.start, rows.rows) for values in table)
        else:
            places = rows.positions[0].to(hidden.device)
            cos, sin, signed_sin = (values.index_select(0, places) for values in table)
        return cos, sin, signed_sin

    def cos_sin(self, rows: Rows, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cosines and sines [positions, d], and int64 [T] where in them the rows are: nothing is gathered."""
        places = rows.positions[0].to(hidden.device)
        if self.fixed:
            cos, sin, _ = self.whole(rows, hidden)
            return cos, sin, places
        cos, sin = self.compute(hidden, places[None])
        return cos.contiguous(), sin.contiguous(), torch.arange(rows.rows, device=hidden.device)

    def whole(self, rows: Rows, hidden: torch.Tensor, kind: str | None = None) -> Table:
        """Tables of positions 0, 1, 2, ..., long enough for the rows; only where they are ``fixed``."""
        return self.table(rows.end, hidden, kind)

    def table(self, end: int, hidden: torch.Tensor, kind: str | None = None) -> Table:
        """Tables of positions 0 .. ``end`` - 1 or more, as in :meth:`whole`."""
        key = (hidden.device, hidden.dtype, kind)
        if key not in self._tables or len(self._tables[key][0]) < end:
            size = max(1024, 1 << end.bit_length())
            self._tables[key] = self._table(hidden, torch.arange(size, device=hidden.device)[None], kind)
        return self._tables[key]

    def compute(
        self, hidden: torch.Tensor, positions: torch.Tensor, kind: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, d] by the module.

        Raises:
            TargetError: the module returns something else.
        """
        more = () if kind is None else (kind,)
        said = self.module(hidden[None], positions, *more)
        if not isinstance(said, tuple):
            raise TargetError(f"{type(self.module).__name__} gives no cosines and sines, which are all specdec knows")
        cos, sin = said
        return cos[0], sin[0]

    def _table(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str | None = None) -> Table:
        cos, sin = self.compute(hidden, positions, kind)
        return cos, sin, signed(sin)


def signed(sin: torch.Tensor) -> torch.Tensor:
    """Sines [..., d] with their first half negated."""
    first, second = sin.chunk(2, -1)
    return torch.cat((-first, second), -1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Heads [..., T, d] at rotary positions [T, d]: halves swapped is a roll, with the sign moved into the sines."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), signed_sin)


def rope_kinds(config: Any) -> list[Mapping[str, Any]]:
    """The rope parameters of each kind of attention; one entry where all layers share them."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [values for values in rope.values() if isinstance(values, Mapping)]
    return nested or [rope]


def rope_depends_on_length(rope: Mapping[str, Any]) -> bool:
    """Whether frequencies change with the length of the text."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    return "dynamic" in kind or kind == "longrope"
