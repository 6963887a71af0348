"""One forward for the rows of several sequences, each of which gets its part of the output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from specdec.sampling.scores import RowArgmax
from specdec.step.batched_rows import rows_of
from specdec.step.block import Block
from specdec.step.forward_passes import Pass
from specdec.step.tree import Entry
from specdec.target import Target, TargetOutput

__all__ = ["Forward", "ForwardRows", "forward_together"]


@dataclass(slots=True, eq=False)
class ForwardRows:
    """What one sequence brings to a forward.

    Attributes:
        block: its rows.
        rows: those whose logits are wanted; None for all, empty for none.
        entry: hidden states that passed the first layers already.
        taps: hidden layers wanted back.
        top_k: how many of each scored row's largest logits will be read.
    """

    block: Block
    rows: Sequence[int] | None = None
    entry: Entry | None = None
    taps: Collection[int] = ()
    top_k: int = 1


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs blocks through a model's layers up to ``exit_layer``, None for all: what passes through a model wait for."""

    target: Target
    exit_layer: int | None = None

    def of(self, block: Block, rows: Sequence[int] | None = None) -> Pass:
        """The pass of one block, which gives a TargetOutput, with logits of these rows, of all for None."""
        return Pass(self, ForwardRows(block, rows), self.target.batch_invariant)

    def __call__(self, parts: Sequence[ForwardRows]) -> list[TargetOutput]:
        with self.target.active():
            return forward_together(self.target, parts, exit_layer=self.exit_layer)


def forward_together(target: Target, parts: Sequence[ForwardRows], exit_layer: int | None = None) -> list[TargetOutput]:
    """Run the rows of several sequences as one forward; each one's part of the output, with its taps, in order.

    Rows that passed the first layers already come in where these end: the others are run up to there first.
    """
    if len(parts) == 1:
        (part,) = parts
        return [
            target.forward(
                part.block, entry=part.entry, exit_layer=exit_layer, taps=part.taps, rows=part.rows, top_k=part.top_k
            )
        ]
    taps, top_k = frozenset[int]().union(*(part.taps for part in parts)), max(part.top_k for part in parts)
    ranked = sorted(parts, key=_layer)
    stages = sorted({*map(_layer, ranked)})
    hidden: torch.Tensor | None = None
    found: dict[int, torch.Tensor] = {}
    for layer, after in zip(stages, (*stages[1:], exit_layer), strict=True):
        within = [part for part in ranked if _layer(part) <= layer]
        block = rows_of([part.block for part in within])
        came = [part.entry.hidden for part in within if part.entry is not None and part.entry.layer == layer]
        entry = Entry(layer, torch.cat(came if hidden is None else [hidden, *came])) if came else None
        rows = _wanted(within) if layer == stages[-1] else ()
        output = target.forward(block, entry=entry, exit_layer=after, taps=taps, rows=rows, top_k=top_k)
        hidden = output.hidden
        found |= output.taps
    whole = TargetOutput(output.logits, output.hidden, found)
    argmax = None
    if output.logits is not None:
        argmax = RowArgmax(output.logits) if output.argmax is None else output.argmax[0]
    outputs: dict[ForwardRows, TargetOutput] = {}
    first = scored = 0
    for part in ranked:
        last, wanted = first + part.block.rows, part.block.rows if part.rows is None else len(part.rows)
        own = (argmax, scored, scored + wanted) if wanted and argmax is not None else None
        outputs[part] = whole.part(first, last, own, part.taps)
        first, scored = last, scored + wanted
    return [outputs[part] for part in parts]


def _layer(part: ForwardRows) -> int:
    """The layer that its rows enter at; -1 where they are tokens."""
    return -1 if part.entry is None else part.entry.layer


def _wanted(parts: Sequence[ForwardRows]) -> list[int] | None:
    """The rows among all whose logits somebody wants; None for all of them."""
    if all(part.rows is None for part in parts):
        return None
    wanted, first = list[int](), 0
    for part in parts:
        rows = range(part.block.rows) if part.rows is None else part.rows
        wanted += [first + row for row in rows]
        first += part.block.rows
    return wanted
