"""Running a target with some layers left out, into the draft rows' slots in its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from specdec.step.batched_rows import rows_of
from specdec.step.block import Block
from specdec.step.tree import Entry
from specdec.target import Target

__all__ = ["SkippedForward"]


@dataclass(frozen=True)
class SkippedForward:
    """Runs blocks of several sequences through a target's layers except those in ``skip``; gives all rows' logits."""

    target: Target
    skip: frozenset[int]

    def __call__(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """[T, V] logits for each block of T rows."""
        target, rows = self.target, rows_of(blocks)
        hidden: torch.Tensor | None = None
        with target.active():
            for first, last in self._runs():
                if first and hidden is None:
                    hidden = target.embed(rows.ids)
                entry = None if hidden is None else Entry(first, hidden)
                if last == target.num_layers:
                    logits = target.forward(rows, entry=entry).logits
                    break
                hidden = target.forward(rows, entry=entry, exit_layer=last, rows=()).hidden
            else:  # the last layer is left out; the head reads its input
                hidden = target.embed(rows.ids) if hidden is None else hidden
                logits = target.head(target.norm(hidden))
        assert logits is not None
        return [*torch.split(logits, [block.rows for block in blocks])]

    def _runs(self) -> list[tuple[int, int]]:
        """The ranges [first, last) of consecutive layers that run."""
        kept = [layer for layer in range(self.target.num_layers) if layer not in self.skip]
        groups = [[*own] for _, own in groupby(kept, key=lambda layer: layer - kept.index(layer))]
        return [(own[0], own[-1] + 1) for own in groups]
