"""One step of sequences that share a forward: propose, forward, verify, commit, observe.

One sequence is a batch of one. Each sequence has its own cache, drafting session and noise, so its text does not depend
on the others. A sequence whose prompt has not been run completely has a chunk of the prompt in place of a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from specdec.drafting.joint_forward import forward_together
from specdec.engine.sequence import ScheduledRows, SequenceState
from specdec.engine.step_observer import StepObserver
from specdec.results import Step
from specdec.sampling.verify import Readback
from specdec.step import device_copies
from specdec.step.forward_passes import Passes, run_all
from specdec.target import Target, TargetOutput

__all__ = ["Outcome", "step"]

Outcome = tuple[SequenceState, Step | Exception]
"""A sequence, and the step that it took or the error that ended it."""


def step(sequences: Sequence[SequenceState], target: Target, observer: StepObserver, row_limit: int) -> list[Outcome]:
    """Take one step; returns the outcome of each sequence that drafted or failed. A failure does not affect the others.

    A forward has at most ``row_limit`` rows: drafts that waited for room, then new drafts, then chunks of prompts.
    ``observer`` times the parts of the step; it affects texts only by whether sequences draft, never a token.
    """
    outcomes: list[Outcome] = []
    drafted: list[SequenceState] = []  # sequences whose drafts waited for room
    fresh: list[SequenceState] = []
    for sequence in sequences:
        if sequence.scheduled is not None:
            drafted.append(sequence)
        elif not sequence.prefilling:
            fresh.append(sequence)
    observer.begin(fresh, len(sequences), target.head_device)
    propose(fresh, observer, outcomes)
    batch = schedule(drafted + fresh, sequences, row_limit, outcomes)
    observer.scheduled()
    ran = forward(target, batch, outcomes)
    observer.ran(ran)
    if device_copies.is_apart(target.head_device):
        read_back(ran)
    for rows, output in ran:
        sequence = rows.sequence
        try:
            verdict = sequence.verify(rows, output)
            observer.verified()
            sequence.commit(rows, verdict, output)
            observer.committed()
            sequence.observe(rows, verdict, output)
            taken = observer.observed(rows, verdict)
        except Exception as error:
            outcomes.append((sequence, error))
            observer.failed()
        else:
            if taken is not None:
                outcomes.append((sequence, taken))
    observer.end()
    return outcomes


def propose(sequences: Sequence[SequenceState], observer: StepObserver, outcomes: list[Outcome]) -> None:
    """Let each sequence draft; passes that their sessions wait for are run together."""
    waiting: list[tuple[SequenceState, Passes[ScheduledRows]]] = []
    for sequence in sequences:
        try:
            proposed = sequence.propose(observer.batch_load, observer.rests)
        except Exception as error:
            outcomes.append((sequence, error))
            continue
        if isinstance(proposed, ScheduledRows):
            sequence.scheduled = proposed
        else:
            waiting.append((sequence, proposed))
    if not waiting:
        return
    for (sequence, _), drafted in zip(waiting, run_all([passes for _, passes in waiting]), strict=True):
        if isinstance(drafted, Exception):
            outcomes.append((sequence, drafted))
        else:
            sequence.scheduled = drafted


def schedule(
    drafted: Sequence[SequenceState], sequences: Sequence[SequenceState], row_limit: int, outcomes: list[Outcome]
) -> list[ScheduledRows]:
    """The rows of the next forward: drafts in the given order while they fit, then chunks of prompts.

    A sequence for whose prompt no memory is left ends with its error.
    """
    left = row_limit
    batch: list[ScheduledRows] = []
    for sequence in drafted:
        scheduled = sequence.scheduled
        if scheduled is not None and scheduled.block.rows <= left:
            left -= scheduled.block.rows
            sequence.scheduled = None
            batch.append(scheduled)
    for sequence in sequences:
        if not left or not sequence.prefilling:
            continue
        try:
            sequence.look_again()
            chunk = sequence.chunk(left) if sequence.prefilling else None
        except Exception as error:
            outcomes.append((sequence, error))
            continue
        if chunk is not None:
            batch.append(chunk)
            left -= chunk.block.rows
    return batch


def forward(
    target: Target, batch: Sequence[ScheduledRows], outcomes: list[Outcome]
) -> list[tuple[ScheduledRows, TargetOutput]]:
    """Run all rows as one forward; returns the rows that ran, each with its part of the output.

    If the forward raises, each sequence's rows are run alone, which writes the same numbers to the same slots.
    """
    if not batch:
        return []
    try:
        return [*zip(batch, forward_together(target, batch), strict=True)]
    except Exception as error:
        if len(batch) == 1:
            outcomes.append((batch[0].sequence, error))
            return []
    return [pair for rows in batch for pair in forward(target, [rows], outcomes)]


def read_back(ran: Sequence[tuple[ScheduledRows, TargetOutput]]) -> None:
    """Copy the tensors that verification reads from a device to the host, in one copy for all sequences.

    If that fails for a sequence, its ``verify`` reads them itself, and raises the sequence's own error.
    """
    waiting: list[ScheduledRows] = []
    for rows, output in ran:
        with suppress(Exception):
            rows.readback = rows.sequence.read(rows, output)
        if rows.readback is not None:
            waiting.append(rows)
    try:
        if waiting:
            Readback.copy([rows.readback for rows in waiting if rows.readback is not None])
    except Exception:
        for rows in waiting:
            rows.readback = None
