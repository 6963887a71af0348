"""Running a target with some sublayers left out, into the draft rows' slots in its own cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from specdec.step.batched_rows import rows_of
from specdec.step.block import Block
from specdec.step.tree import Entry
from specdec.target import Target

__all__ = ["Skip", "SkippedForward", "halves_of"]


@dataclass(frozen=True)
class Skip:
    """The sublayers to leave out: the layers whose ``attention`` is not run, and those whose ``mlp`` is not."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(cls, layers: Iterable[int], attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Skip:
        """Whole ``layers``, and of others the attention or the MLP alone."""
        whole = frozenset(layers)
        return cls(whole | {*attention}, whole | {*mlp})

    @property
    def whole(self) -> frozenset[int]:
        """The layers of which nothing is run."""
        return self.attention & self.mlp

    def __bool__(self) -> bool:
        return bool(self.attention or self.mlp)

    def runs(self, layers: int) -> list[tuple[str | None, int, int]]:
        """What runs, in order: ranges [first, last) of layers, each with the part that is left out of all of them."""
        parts = [
            (layer, "mlp" if layer in self.mlp else "attention" if layer in self.attention else None)
            for layer in range(layers)
            if layer not in self.whole
        ]
        # Consecutive layers without the same part have the same difference of layer and place.
        groups = [[*own] for _, own in groupby(enumerate(parts), key=lambda one: (one[1][0] - one[0], one[1][1]))]
        return [(own[0][1][1], own[0][1][0], own[-1][1][0] + 1) for own in groups]


@dataclass(frozen=True)
class SkippedForward:
    """Runs blocks of several sequences through a target's sublayers except those in ``skip``; gives all rows' logits.

    A sublayer of attention that runs stores its keys and values in the rows' slots; one that is left out stores none,
    and none of the draft's rows looks for them.
    """

    target: Target
    skip: Skip

    def __call__(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """[T, V] logits for each block of T rows."""
        target, rows = self.target, rows_of(blocks)
        logits: torch.Tensor | None = None
        hidden: torch.Tensor | None = None
        with target.active():
            for without, first, last in self.skip.runs(target.num_layers):
                if hidden is None and (first or without):
                    hidden = target.embed(rows.ids)
                if without is not None:
                    runner = halves_of(target, without)
                    hidden, _ = runner.run(hidden, rows, first, last, ())
                    continue
                entry = None if hidden is None else Entry(first, hidden)
                if last == target.num_layers:
                    logits = target.forward(rows, entry=entry).logits
                else:
                    hidden = target.forward(rows, entry=entry, exit_layer=last, rows=()).hidden
            if logits is None:  # the last layer is left out, wholly or in part; the head reads what came before
                hidden = target.embed(rows.ids) if hidden is None else hidden
                logits = target.head(target.norm(hidden))
        return [*torch.split(logits, [block.rows for block in blocks])]


def halves_of(target: Target, without: str) -> Any:
    """A runner of all layers without their ``attention`` or their ``mlp``; None where the target has none."""
    made = getattr(target, "half_layers", None)
    return None if made is None else made(without)
