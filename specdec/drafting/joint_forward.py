"""Joint forward: the rows of several sequences in one forward, whose output is divided among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from specdec.step.batched_rows import rows_of
from specdec.step.block import Block
from specdec.step.forward_passes import Pass
from specdec.step.tree import Entry
from specdec.target import Target, TargetOutput

__all__ = ["Forward", "ForwardRows", "forward_together"]


@dataclass(slots=True, eq=False)
class ForwardRows:
    """One sequence's rows of a forward.

    Attributes:
        block: the rows.
        rows: rows to return logits for; None for all, empty for none.
        entry: hidden states of rows that already passed the first layers.
        taps: hidden layers to return.
        top_k: how many of each scored row's largest logits will be read.
    """

    block: Block
    rows: Sequence[int] | None = None
    entry: Entry | None = None
    taps: Collection[int] = ()
    top_k: int = 1


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs blocks through a model up to ``exit_layer``, None for all layers; the ``run`` of a pass through a model."""

    target: Target
    exit_layer: int | None = None

    def of(self, block: Block, rows: Sequence[int] | None = None) -> Pass:
        """The pass of one block; its output is a TargetOutput with logits of ``rows``, None for all rows."""
        return Pass(self, ForwardRows(block, rows), self.target.batch_invariant)

    def __call__(self, parts: Sequence[ForwardRows]) -> list[TargetOutput]:
        with self.target.active():
            return forward_together(self.target, parts, exit_layer=self.exit_layer)


def forward_together(target: Target, parts: Sequence[ForwardRows], exit_layer: int | None = None) -> list[TargetOutput]:
    """Run the rows of several sequences as one forward; returns each sequence's part of the output, in order.

    Rows with an entry join at its layer; the other rows are run up to that layer first.
    """
    if len(parts) == 1:
        (part,) = parts
        return [
            target.forward(
                part.block, entry=part.entry, exit_layer=exit_layer, taps=part.taps, rows=part.rows, top_k=part.top_k
            )
        ]
    taps, top_k = frozenset[int]().union(*[part.taps for part in parts]), max([part.top_k for part in parts])
    stages = sorted({_layer(part) for part in parts})
    ranked = parts if len(stages) == 1 else sorted(parts, key=_layer)
    hidden: torch.Tensor | None = None
    found, first_time = dict[int, torch.Tensor](), False
    for layer, after in zip(stages, (*stages[1:], exit_layer), strict=True):
        within = ranked if layer == stages[-1] else [part for part in ranked if _layer(part) <= layer]
        block = rows_of([part.block for part in within])
        entering = [part.entry.hidden for part in within if part.entry is not None and part.entry.layer == layer]
        entry = Entry(layer, torch.cat(entering if hidden is None else [hidden, *entering])) if entering else None
        rows = _wanted(within) if layer == stages[-1] else ()
        output = target.forward(block, entry=entry, exit_layer=after, taps=taps, rows=rows, top_k=top_k)
        hidden = output.hidden
        found |= output.taps
        first_time |= output.first_time
    together = TargetOutput(None, output.hidden, found, first_time=first_time)
    scores = None if output.logits is None else output.scores(None)
    outputs: dict[int, TargetOutput] = {}
    first = scored = 0
    for part in ranked:
        last, wanted = first + part.block.rows, part.block.rows if part.rows is None else len(part.rows)
        own = (scores, scored, scored + wanted) if wanted and scores is not None else None
        outputs[id(part)] = together.part(first, last, own, part.taps)
        first, scored = last, scored + wanted
    return [outputs[id(part)] for part in parts]


def _layer(part: ForwardRows) -> int:
    """The layer at which the rows enter; -1 for tokens."""
    return -1 if part.entry is None else part.entry.layer


def _wanted(parts: Sequence[ForwardRows]) -> list[int] | None:
    """The rows of the joint forward to return logits for; None for all."""
    if all(part.rows is None for part in parts):
        return None
    rows_wanted, first = list[int](), 0
    for part in parts:
        rows = range(part.block.rows) if part.rows is None else part.rows
        rows_wanted += [first + row for row in rows]
        first += part.block.rows
    return rows_wanted
