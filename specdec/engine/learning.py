"""Learning: steps of generations that share forwards, with what they show of time.

The step itself is :func:`specdec.engine.step.step`, which knows no clock. Here it is timed from outside, and its
results go into statistics, the live cost curve, row policies and the fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, NamedTuple

from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.prices import UNBATCHED, BatchLoad, Rest
from specdec.engine.clocks import Drafting, TimedTarget
from specdec.engine.decoding import Decoding
from specdec.engine.step import StepResult, step
from specdec.results import Step
from specdec.runners.visibility import bucket
from specdec.step import device_copies
from specdec.target import Target

__all__ = ["Learning", "Outcome"]

Outcome = tuple[Decoding, Step | Exception]
"""A generation, and the step that it took or the error that ended it."""


class _Resting(NamedTuple):
    """Whether sequences take a plain step because drafting does not pay, and what was asked to know.

    Attributes:
        rests: the answer; for a step that only runs prompts, what would be answered.
        fallback: what was asked, or None; it judges one drafter.
        sequences, draws: how many sequences draft, and whether any of them samples.
    """

    rests: Rest
    fallback: Fallback | None
    sequences: int
    draws: bool


class _Taken(NamedTuple):
    """What a step took in all.

    Attributes:
        rows, length: rows of the forward, and tokens before them, on average.
        whole: whether all rows are drafts that go through all layers, and have logits.
        forward, drafting, seconds: seconds of the forward, of sessions, and of the whole step; the first is None unless
            all rows ran at once.
        first_time: whether the step had a first time (:class:`specdec.step.first_time.FirstTimes`) in it.
    """

    rows: int
    length: int
    whole: bool
    forward: float | None
    drafting: float
    seconds: float
    first_time: bool


class Learning:
    """Takes steps, times them, and tells of them whatever learns from time.

    What is compared, by the live curve and the fallback, is whole steps on a device, as a forward is only launched
    there and the copy out waits for it; on a CPU the curve gets the forwards. Steps with a first time in them are not
    compared, nor is a device's first step of each kind, in which libraries may load what they need.

    Args:
        target: the model.
        live: the live cost curve, or None.
        kinds: the kinds of steps that this engine has had; on a device a new one is added by its first step.
    """

    def __init__(self, target: Target, live: LiveCosts | None, kinds: set[Any]) -> None:
        self._device, self._apart = target.head_device, device_copies.is_apart(target.head_device)
        self._target = TimedTarget(target)
        self._live, self._kinds = live, kinds
        self._rows_each = 1.0  # of the drafts of the latest step

    def step(self, decodings: Sequence[Decoding], row_limit: int) -> list[Outcome]:
        """Take one step of these generations; returns the outcome of each that drafted or failed."""
        running = len(decodings)
        load = BatchLoad(running, round((running - 1) * self._rows_each)) if running > 1 else UNBATCHED
        drafting = [decoding for decoding in decodings if decoding.sequence.drafts]
        resting = self._resting(drafting or decodings)
        if not drafting:  # prompts' rows alone, or drafts that waited: nothing to compare
            resting = resting._replace(fallback=None)
        self._target.begin()
        sequences = [decoding.sequence for decoding in decodings]
        prompts, began = [sequence.prefilling for sequence in sequences], perf_counter()
        results = step(sequences, self._target.run, row_limit=row_limit, load=load, resting=resting.rests)
        seconds = perf_counter() - began
        spent = [decoding.drafting.take() for decoding in decodings]
        for decoding, own, prompt in zip(decodings, spent, prompts, strict=True):
            decoding.drafted(own.seconds, prompt=prompt)
        taken = self._taken(spent, results, seconds)
        if not self._apart and taken.whole and not taken.first_time and taken.forward is not None and self._live:
            self._live.note(taken.rows, taken.length, taken.forward)
        outcomes = self._count(decodings, results, began, taken)
        if outcomes:
            self._compare(results, resting, taken)
        return outcomes

    def _resting(self, drafting: Sequence[Decoding]) -> _Resting:
        """Whether those that draft next rest. If sequences of several drafters share a forward, none of them rests."""
        fallback = drafting[0].fallback if drafting else None
        if fallback is None or any(decoding.fallback is not fallback for decoding in drafting):
            return _Resting(Rest.NONE, None, 0, False)
        draws = any(decoding.sequence.draws for decoding in drafting)
        rests = Rest(fallback.rests(len(drafting), draws))
        if self._apart and rests and any(decoding.asked for decoding in drafting):
            # For what sessions launched when they observed: it belongs to drafted steps.
            device_copies.wait(self._device)
        return _Resting(rests, fallback, len(drafting), draws)

    def _taken(self, spent: Sequence[Drafting], results: Sequence[StepResult], seconds: float) -> _Taken:
        """What the step took; ``spent``: what each session did."""
        runs = self._target.runs
        ran = [result.rows for result in results if result.rows is not None]
        return _Taken(
            rows=sum([rows.step.rows for rows in ran]),
            length=sum([rows.step.lengths[0] for rows in ran]) // max(len(ran), 1),
            whole=bool(ran) and all(rows.is_whole for rows in ran),
            forward=runs[0].seconds if len(runs) == 1 else None,
            drafting=sum([own.seconds for own in spent]),
            seconds=seconds,
            first_time=any(one.first_time for one in runs) or any(one.first_time for one in spent),
        )

    def _count(
        self, decodings: Sequence[Decoding], results: Sequence[StepResult], began: float, taken: _Taken
    ) -> list[Outcome]:
        """Count the step with each generation; the forward's time is divided by rows, the rest equally."""
        forward = sum([run.seconds for run in self._target.runs])
        rest = max(taken.seconds - taken.drafting - forward, 0.0) / max(len(results), 1)
        by_sequence, outcomes = {decoding.sequence: decoding for decoding in decodings}, list[Outcome]()
        for result in results:
            decoding = by_sequence[result.sequence]
            if result.error is not None:
                outcomes.append((decoding, result.error))
                continue
            assert result.rows is not None
            target = forward * result.rows.step.rows / taken.rows
            done = decoding.took(result, began=began, target=target, rest=rest, first_time=taken.first_time)
            if done is not None:
                outcomes.append((decoding, done))
        return outcomes

    def _compare(self, results: Sequence[StepResult], resting: _Resting, taken: _Taken) -> None:
        """Tell the fallback of the step, and on a device the live curve, if it can be compared with others."""
        ran = [result.rows for result in results if result.rows is not None]
        tokens = [len(one.verdict.tokens) for one in results if one.verdict and one.rows and one.rows.draft is not None]
        if not tokens:
            return
        self._rows_each, compared = taken.rows / len(ran), not taken.first_time
        if self._apart:
            kind = bucket(len(ran)), bucket(taken.rows), taken.whole, resting.rests, resting.draws
            compared &= kind in self._kinds
            self._kinds.add(kind)
        if not compared or len(tokens) != len(ran):
            return
        if self._apart and self._live is not None and taken.whole:
            self._live.note(taken.rows, taken.length, max(taken.seconds - taken.drafting, 0.0))
        if resting.fallback is not None and resting.sequences == len(tokens):
            resting.fallback.note(
                resting.sequences,
                resting.draws,
                tokens=sum(tokens),
                length=taken.length,
                rows=taken.rows,
                whole=taken.whole,
                drafting=taken.drafting,
                seconds=taken.seconds,
            )
