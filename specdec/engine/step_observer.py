"""Step observer: time and tokens of a step, for statistics, the live cost curve, row policies and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import UNBATCHED, BatchLoad
from specdec.engine.sequence import ScheduledRows, SequenceState
from specdec.results import Step
from specdec.sampling.verify import Verdict
from specdec.target import TargetOutput

__all__ = ["StepObserver"]


class StepObserver:
    """Times the parts of a step; ``step`` calls its methods in their order as each part ends.

    Args:
        live: the live cost curve, or None.

    Attributes:
        batch_load: load of the next forward.
        rests: whether sequences take a plain step because drafting does not pay.
    """

    def __init__(self, live: LiveCosts | None) -> None:
        self.batch_load, self.rests = UNBATCHED, False
        self._live = live
        self._rows_each = 1.0  # of the drafts of the latest step
        self._fallback: Fallback | None = None
        self._asked = 0, False  # arguments of fallback.rests: number of sequences, and whether any of them samples

    def begin(self, drafting: Sequence[SequenceState], running: int) -> None:
        """``running`` sequences run, and the ``drafting`` ones draft next."""
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

    def scheduled(self) -> None:
        """The rows of the forward are known."""
        self._began = perf_counter()

    def ran(self, batch: Sequence[tuple[ScheduledRows, TargetOutput]]) -> None:
        """These rows were run."""
        self._now = perf_counter()
        self._tokens = self._drafted = self._rows = length = 0
        self._drafting, self._seconds, self._whole = 0.0, self._now - self._began, True
        making = 0.0
        for rows, _ in batch:
            self._rows += rows.block.rows
            length += rows.block.length
            making += rows.making
            self._seconds += rows.drafting + rows.making
            self._whole &= rows.is_whole
        self._each = (self._now - self._began) / max(self._rows, 1)
        self._batch, self._length = len(batch), length // max(len(batch), 1)
        if self._live is not None and self._whole and batch:
            self._live.note(self._rows, self._length, self._now - self._began + making)
        self._after = self._now

    def verified(self) -> None:
        """A sequence's draft was verified."""
        self._verified = perf_counter()

    def committed(self) -> None:
        """It was committed."""
        self._committed = perf_counter()

    def observed(self, rows: ScheduledRows, verdict: Verdict) -> Step | None:
        """Its session observed it. Returns the step that it took, None for a chunk of the prompt."""
        began, self._now = self._now, perf_counter()
        sequence, count = rows.sequence, rows.block.rows
        stats, seconds = sequence.stats, rows.making + self._each * count
        if rows.draft is None:
            stats.seconds.prefill += seconds + self._now - began
            return None
        drafting = rows.drafting + self._now - self._committed
        stats.seconds.draft += drafting
        stats.seconds.target += seconds
        stats.seconds.verify += self._verified - began
        stats.seconds.other += self._committed - self._verified
        stats.acceptance_lengths.append(len(verdict.tokens))
        stats.rows.append(count)
        taken = Step(len(sequence.steps), verdict.tokens, count, sequence.drafter.name)
        sequence.steps.append(taken)
        sequence.learn(rows, verdict)
        self._drafted += 1
        self._drafting += drafting
        self._tokens += len(verdict.tokens)
        return taken

    def failed(self) -> None:
        """A sequence ended by an error."""
        self._now = perf_counter()

    def end(self) -> None:
        """All sequences have gone on."""
        if self._drafted == 0:
            return
        self._rows_each = self._rows / self._batch
        if self._fallback is not None and self._asked[0] == self._drafted == self._batch:
            self._fallback.note(
                *self._asked,
                tokens=self._tokens,
                length=self._length,
                rows=self._rows,
                whole=self._whole,
                drafting=self._drafting,
                seconds=self._seconds + perf_counter() - self._after,
            )
