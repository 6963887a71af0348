"""Pass: what a drafting session waits for while a model runs; those of several sequences are run as one.

A drafter that runs a model writes its drafting as a generator (``BatchedSession.passes``), which yields each pass and
is sent what it gave. Whoever drives it runs the passes one by one, or those of several sequences together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch

from specdec.block import Block, rows_of
from specdec.draft import Entry
from specdec.errors import DraftError, shown
from specdec.sampling import Peaks
from specdec.target import Target, TargetOutput

__all__ = [
    "Forward",
    "Part",
    "Pass",
    "Passes",
    "Waited",
    "alone",
    "forward_together",
    "resume",
    "run_together",
    "timed",
]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Pass:
    """What a session waits for.

    Attributes:
        run: what several sequences brought, to what each of them gets, in order. It serves those whose ``run`` is
            equal, as a method of the drafter that they share is.
        brought: by this sequence.
        alike: what it gets is the same, bit for bit, whatever others bring.
        seconds: that it took, once it was run; an equal share where others were run with it.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    brought: Any
    alike: bool = False
    seconds: float = field(default=0.0, init=False)


Passes = Generator[Pass, Any, T]
"""Yields passes, is sent what each of them gave, and returns what it was all for."""


def resume(passes: Passes[T], answer: Any) -> Pass:
    """The next pass, after the answer to the one before; None at first. An error is raised where it was waited for.

    Raises:
        StopIteration: there is none; its ``value`` is the result.
    """
    return passes.throw(answer) if isinstance(answer, Exception) else passes.send(answer)


def run_together(passes: Sequence[Pass]) -> list[Any]:
    """What each pass gives, in order, or the error that it ended with; those with an equal ``run`` are run at once."""
    answers: list[Any] = [None] * len(passes)
    left = [*range(len(passes))]
    while left:
        run = passes[left[0]].run
        group = [place for place in left if passes[place].run == run]
        left = [place for place in left if place not in group]
        began = perf_counter()
        try:
            found = run([passes[place].brought for place in group])
            if len(found) != len(group):
                raise DraftError(f"{run} gave {len(found)} answers to {len(group)} passes; it must give one to each")
        except Exception as error:
            found = [error] * len(group)
        seconds = perf_counter() - began
        for place, answer in zip(group, found, strict=True):
            answers[place], passes[place].seconds = answer, seconds / len(group)
    return answers


def alone(passes: Passes[T]) -> T:
    """What comes of passes, each run by itself."""
    answer = None
    while True:
        try:
            asked = resume(passes, answer)
        except StopIteration as done:
            result: T = done.value
            return result
        (answer,) = run_together([asked])


@dataclass(slots=True)
class Waited:
    """Seconds that a session waited so far.

    Attributes:
        passes: for its passes.
        others: for others who drafted meanwhile.
    """

    passes: float = 0.0
    others: float = 0.0


def timed(passes: Passes[T], waited: Waited, *, together: bool = True) -> Passes[T]:
    """The same passes, whose time is added to what was ``waited``.

    ``together`` False: passes that are not ``alike`` are run by themselves, here and now.
    """
    answer = None
    while True:
        try:
            asked = resume(passes, answer)
        except StopIteration as done:
            result: T = done.value
            return result
        if not isinstance(asked, Pass):
            answer = DraftError(f"a session waits for {shown(asked)}, of type {type(asked).__name__}; yield a Pass")
            continue
        if together or asked.alike:
            began = perf_counter()
            try:
                answer = yield asked
            except Exception as error:
                answer = error
            waited.others += perf_counter() - began - asked.seconds
        else:
            (answer,) = run_together([asked])
        waited.passes += asked.seconds


@dataclass(slots=True, eq=False)
class Part:
    """What one sequence brings to a forward.

    Attributes:
        block: its rows.
        rows: those whose logits are wanted; None for all, empty for none.
        entry: hidden states that passed the first layers already.
    """

    block: Block
    rows: Sequence[int] | None = None
    entry: Entry | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs blocks through a model's layers up to ``exit_layer``, None for all: what passes through a model wait for."""

    target: Target
    exit_layer: int | None = None

    def of(self, block: Block, rows: Sequence[int] | None = None) -> Pass:
        """The pass of one block, which gives a TargetOutput, with logits of these rows, of all for None."""
        return Pass(self, Part(block, rows), self.target.alike)

    def __call__(self, parts: Sequence[Part]) -> list[TargetOutput]:
        with self.target.active():
            return forward_together(self.target, parts, exit_layer=self.exit_layer)


def forward_together(
    target: Target,
    parts: Sequence[Part],
    taps: Collection[int] = (),
    exit_layer: int | None = None,
    likeliest: int = 1,
) -> list[TargetOutput]:
    """Run the rows of several sequences as one forward; each one's part of the output, in order.

    Rows that passed the first layers already come in where these end: the others are run up to there first.
    """
    if len(parts) == 1:
        (part,) = parts
        return [
            target.forward(
                part.block, entry=part.entry, exit_layer=exit_layer, taps=taps, rows=part.rows, likeliest=likeliest
            )
        ]
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
        output = target.forward(block, entry=entry, exit_layer=after, taps=taps, rows=rows, likeliest=likeliest)
        hidden = output.hidden
        found |= output.taps
    whole = TargetOutput(output.logits, output.hidden, found)
    peaks = None
    if output.logits is not None:
        peaks = Peaks(output.logits) if output.peaks is None else output.peaks[0]
    outputs: dict[Part, TargetOutput] = {}
    first = scored = 0
    for part in ranked:
        last, wanted = first + part.block.rows, part.block.rows if part.rows is None else len(part.rows)
        own = (peaks, scored, scored + wanted) if wanted and peaks is not None else None
        outputs[part] = whole.part(first, last, own)
        first, scored = last, scored + wanted
    return [outputs[part] for part in parts]


def _layer(part: Part) -> int:
    """The layer that its rows enter at; -1 where they are tokens."""
    return -1 if part.entry is None else part.entry.layer


def _wanted(parts: Sequence[Part]) -> list[int] | None:
    """The rows among all whose logits somebody wants; None for all of them."""
    if all(part.rows is None for part in parts):
        return None
    wanted, first = list[int](), 0
    for part in parts:
        rows = range(part.block.rows) if part.rows is None else part.rows
        wanted += [first + row for row in rows]
        first += part.block.rows
    return wanted
