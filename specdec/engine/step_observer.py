"""Step observer: time and tokens of a step, for statistics, the live cost curve, row policies and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import UNBATCHED, BatchLoad
from specdec.engine.sequence import ScheduledRows, SequenceState
from specdec.results import Step
from specdec.sampling.verify import Verdict
from specdec.step import device_copies
from specdec.step.first_time import FirstTimes
from specdec.step.visibility import bucket
from specdec.target import TargetOutput

__all__ = ["StepObserver"]


class StepObserver:
    """Times the parts of a step; ``step`` calls its methods in their order as each part ends.

    What is compared, by the live curve and the fallback, is whole steps on a device, as a forward is only launched
    there and the copy out waits for it; on a CPU the curve gets the forwards. Steps with a first time in them
    (:class:`specdec.step.first_time.FirstTimes`) are not compared, nor is a device's first step of each kind, in which
    libraries may load what they need.

    Args:
        live: the live cost curve, or None.
        kinds: the kinds of steps that this engine has had; on a device a new one is added by its first step.

    Attributes:
        batch_load: load of the next forward.
        rests: whether sequences take a plain step because drafting does not pay.
    """

    def __init__(self, live: LiveCosts | None, kinds: set[Any]) -> None:
        self.batch_load, self.rests = UNBATCHED, False
        self._live, self._kinds = live, kinds
        self._rows_each = 1.0  # of the drafts of the latest step
        self._fallback: Fallback | None = None
        self._asked = 0, False  # arguments of fallback.rests: number of sequences, and whether any of them samples

    def begin(self, drafting: Sequence[SequenceState], running: int, device: torch.device) -> None:
        """``running`` sequences run on the ``device``, and the ``drafting`` ones draft next."""
        self.batch_load = BatchLoad(running, round((running - 1) * self._rows_each)) if running > 1 else UNBATCHED
        # The fallback judges one drafter. If sequences of several drafters share a forward, none of them rests.
        fallback = drafting[0].fallback if drafting else None
        self.rests = False
        if fallback is not None and any(sequence.fallback is not fallback for sequence in drafting):
            fallback = None
        self._fallback = fallback
        if fallback is not None:
            self._asked = len(drafting), any(sequence.draws for sequence in drafting)
            self.rests = fallback.rests(*self._asked)
        self._apart = device_copies.is_apart(device)
        if self._apart and self.rests and any(sequence.asked for sequence in drafting):
            device_copies.wait(device)  # for what sessions launched when they observed: it belongs to drafted steps
        self._first_times, self._start = FirstTimes.seen, perf_counter()

    def scheduled(self) -> None:
        """The rows of the forward are known."""
        self._began = perf_counter()

    def ran(self, batch: Sequence[tuple[ScheduledRows, TargetOutput]]) -> None:
        """These rows were run."""
        self._now = perf_counter()
        self._tokens = self._drafted = self._rows = length = 0
        self._drafting, self._whole, making = 0.0, True, 0.0
        for rows, _ in batch:
            self._rows += rows.block.rows
            length += rows.block.length
            making += rows.making
            self._whole &= rows.is_whole
        self._each = (self._now - self._began) / max(self._rows, 1)
        self._batch, self._length = len(batch), length // max(len(batch), 1)
        if not self._apart and self._live is not None and self._whole and batch and not self._is_first:
            self._live.note(self._rows, self._length, self._now - self._began + making)

    @property
    def _is_first(self) -> bool:
        """Whether the step has had a first time so far."""
        return FirstTimes.seen != self._first_times

    def verified(self) -> None:
        """A sequence's draft was verified."""
        self._verified = perf_counter()

    def committed(self) -> None:
        """It was committed."""
        self._committed = perf_counter()

    def observed(self, rows: ScheduledRows, verdict: Verdict) -> Step | None:
        """Its session observed it. Returns the step that it took, None for a chunk of the prompt."""
        began, now = self._now, perf_counter()
        self._now = now
        sequence, count, tokens = rows.sequence, rows.block.rows, verdict.tokens
        stats = sequence.stats
        spent, seconds = stats.seconds, rows.making + self._each * count
        if rows.draft is None:
            spent.prefill += seconds + now - began
            return None
        verified, committed = self._verified, self._committed
        drafting = rows.drafting + now - committed
        spent.draft += drafting
        spent.target += seconds
        spent.verify += verified - began
        spent.other += committed - verified
        stats.acceptance_lengths.append(len(tokens))
        stats.rows.append(count)
        steps = sequence.steps
        step = Step(len(steps), tokens, count, sequence.drafter.name, None, FirstTimes.seen != self._first_times)
        steps.append(step)
        sequence.learn(rows, verdict)
        self._drafted += 1
        self._drafting += drafting
        self._tokens += len(tokens)
        return step

    def failed(self) -> None:
        """A sequence ended by an error."""
        self._now = perf_counter()

    def end(self) -> None:
        """All sequences have gone on."""
        if self._drafted == 0:
            return
        self._rows_each = self._rows / self._batch
        compared = not self._is_first
        if self._apart:
            kind = bucket(self._batch), bucket(self._rows), self._whole, self.rests, self._asked[1]
            compared &= kind in self._kinds
            self._kinds.add(kind)
        if not compared or self._drafted != self._batch:
            return
        seconds = perf_counter() - self._start
        if self._apart and self._live is not None and self._whole:
            self._live.note(self._rows, self._length, max(seconds - self._drafting, 0.0))
        if self._fallback is not None and self._asked[0] == self._drafted:
            self._fallback.note(
                *self._asked,
                tokens=self._tokens,
                length=self._length,
                rows=self._rows,
                whole=self._whole,
                drafting=self._drafting,
                seconds=seconds,
            )
