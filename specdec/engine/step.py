"""One step of sequences that share a forward: propose, forward, verify, commit, observe.

One sequence is a batch of one. Each sequence has its own cache, drafting session and noise, so its text does not depend
on the others. A sequence whose prompt has not been run completely has a chunk of the prompt in place of a draft.

A step has no clock and keeps no account: it is timed, and its results are read, in :mod:`specdec.engine.decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from specdec.costs.prices import BatchLoad, Rest
from specdec.engine.sequence import ScheduledRows, SequenceState
from specdec.sampling.verify import Verdict
from specdec.step.forward_passes import Passes, run_all
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput

__all__ = ["StepResult", "step"]

Run = Callable[[Sequence[StepInput]], Sequence[StepOutput]]
"""Runs the rows of several sequences as one forward of the target; returns each sequence's part of the output."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What became of a sequence in a step.

    Attributes:
        sequence: the sequence.
        rows: its rows of the forward: a draft, or a chunk of its prompt; None where it failed before.
        verdict: the accepted rows and the emitted tokens; None with an error.
        error: what ended the sequence, or None.
    """

    sequence: SequenceState
    rows: ScheduledRows | None = None
    verdict: Verdict | None = None
    error: Exception | None = None


def step(
    sequences: Sequence[SequenceState], run: Run, *, row_limit: int, load: BatchLoad, resting: Rest
) -> list[StepResult]:
    """Take one step; returns the result of each sequence whose rows ran or that failed, which does not affect others.

    Args:
        sequences: what runs, in the order in which it was admitted.
        run: runs a forward.
        row_limit: most rows of the forward: drafts that waited for room, then new drafts, then chunks of prompts.
        load: load of the forward, for the prices of rows.
        resting: whether sequences take a plain step in place of a draft; where for long, nothing is asked for their
            sessions. Neither changes a token.
    """
    results: list[StepResult] = []
    drafted = [sequence for sequence in sequences if sequence.scheduled is not None]  # they waited for room
    fresh = [sequence for sequence in sequences if sequence.drafts]
    propose(fresh, load, resting, results)
    ran = forward(run, schedule(drafted + fresh, sequences, row_limit, resting, results), results)
    for rows, output in ran:
        sequence = rows.sequence
        try:
            verdict = sequence.verify(rows, output)
            sequence.commit(rows, verdict, output)
            sequence.observe(rows, verdict, output)
        except Exception as error:
            results.append(StepResult(sequence, rows, error=error))
        else:
            results.append(StepResult(sequence, rows, verdict))
    return results


def propose(sequences: Sequence[SequenceState], load: BatchLoad, resting: Rest, results: list[StepResult]) -> None:
    """Let each sequence draft; passes that their sessions wait for are run together."""
    waiting: list[tuple[SequenceState, Passes[ScheduledRows]]] = []
    for sequence in sequences:
        try:
            proposed = sequence.propose(load, resting)
        except Exception as error:
            results.append(StepResult(sequence, error=error))
            continue
        if isinstance(proposed, ScheduledRows):
            sequence.scheduled = proposed
        else:
            waiting.append((sequence, proposed))
    if not waiting:
        return
    for (sequence, _), drafted in zip(waiting, run_all([passes for _, passes in waiting]), strict=True):
        if isinstance(drafted, Exception):
            results.append(StepResult(sequence, error=drafted))
        else:
            sequence.scheduled = drafted


def schedule(
    drafted: Sequence[SequenceState],
    sequences: Sequence[SequenceState],
    row_limit: int,
    resting: Rest,
    results: list[StepResult],
) -> list[ScheduledRows]:
    """The rows of the next forward: drafts in the given order while they fit, then chunks of prompts.

    A sequence for whose prompt no memory is left ends with its error.
    """
    left = row_limit
    batch: list[ScheduledRows] = []
    for sequence in drafted:
        scheduled = sequence.scheduled
        if scheduled is not None and scheduled.step.rows <= left:
            left -= scheduled.step.rows
            sequence.scheduled = None
            batch.append(scheduled)
    for sequence in sequences:
        if not left or not sequence.prefilling:
            continue
        try:
            sequence.look_again()
            chunk = sequence.chunk(left, resting) if sequence.prefilling else None
        except Exception as error:
            results.append(StepResult(sequence, error=error))
            continue
        if chunk is not None:
            batch.append(chunk)
            left -= chunk.step.rows
    return batch


def forward(
    run: Run, batch: Sequence[ScheduledRows], results: list[StepResult]
) -> list[tuple[ScheduledRows, StepOutput]]:
    """Run all rows as one forward; returns the rows that ran, each with its part of the output, fetched.

    If the forward raises, each sequence's rows are run alone, which writes the same numbers to the same slots.
    """
    if not batch:
        return []
    try:
        outputs = run([rows.step for rows in batch])
    except Exception as error:
        if len(batch) == 1:
            results.append(StepResult(batch[0].sequence, error=error))
            return []
        return [pair for rows in batch for pair in forward(run, [rows], results)]
    ran = [*zip(batch, outputs, strict=True)]
    if reading := [pair for pair in ran if pair[0].reads]:
        fetch(reading)
    return ran


def fetch(ran: Sequence[tuple[ScheduledRows, StepOutput]]) -> None:
    """Bring what verification reads of a forward from its device, in one copy for all sequences.

    If that fails for a sequence, its ``verify`` reads again, and raises the sequence's own error.
    """
    waiting = list[tuple[ScheduledRows, list[torch.Tensor]]]()
    for rows, output in ran:
        with suppress(Exception):
            waiting.append((rows, rows.sequence.read(rows, output)))
    if waiting:
        with suppress(Exception):
            top_k = max(rows.step.wanted.top_k for rows, _ in waiting)
            numbers = iter(ran[0][1].fetch(*[tensor for _, own in waiting for tensor in own], top_k=top_k))
            for rows, own in waiting:
                rows.numbers = [next(numbers) for _ in own]
