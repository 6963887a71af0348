"""Generations under way, and the account of their steps: statistics, and what is learned of rows and of time.

A step itself is :func:`specdec.engine.step.step`, which knows no clock. It is timed from outside: its forward here, its
sessions by :mod:`specdec.engine.clocks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from specdec.costs.fallback import Fallback
from specdec.costs.prices import UNBATCHED, BatchLoad, Rest
from specdec.drafter import MergingSession
from specdec.engine.clocks import TimedDrafter
from specdec.engine.prediction import appeared
from specdec.engine.requests import Request
from specdec.engine.sequence import ScheduledRows, SequenceState
from specdec.engine.setup import Setup, pricing_of
from specdec.engine.step import StepResult, step
from specdec.results import Chunk, Generation, Statistics, Step, StepTrace, TokenLogprobs
from specdec.runners.visibility import bucket
from specdec.sampling.verify import Verdict
from specdec.step import device_copies
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput
from specdec.target import run_steps

__all__ = ["Decoding", "Learning"]

_ANY = 1 << 62  # row limit of a forward that only the draft's own limit bounds


class Decoding:
    """A generation, made by ``Engine.begin`` and ``start``, and its statistics, steps and traces.

    One alone runs by ``prefill``, ``step`` and ``chunks``, inside ``target.active()``, many in a ``Scheduler``.

    Attributes:
        sequence: its text and its part of the steps.
        drafting: the time of its session.
        stats, steps: counts, times and steps so far.
        fallback: decides whether the next step drafts; None if every step drafts.
        asked: whether the drafting session was asked for the latest draft.
    """

    def __init__(self, engine: Setup, request: Request) -> None:
        drafter, self._target = TimedDrafter(engine.drafter), engine.target
        pricing = pricing_of(engine, request)
        self._learning, self.drafting = Learning(engine), drafter.drafting
        self.fallback = None if pricing.isolated else engine.fallback
        self.sequence = SequenceState(engine, request, drafter, pricing)
        self.drafting.clear()  # what the session read of a known beginning belongs to the prompt
        self.stats = Statistics(
            prompt_tokens=len(self.tokens),
            reused_tokens=self.sequence.reused,
            lossy=self.sequence.context.sampling.lossy,
            activations=engine.target.options.get("activations"),
        )
        self.steps: list[Step] = []
        self.asked = False
        self._traces, self._logs, self._first_began = request.trace, request.logprobs is not None, 0.0

    @property
    def tokens(self) -> list[int]:
        """Prompt and text. Read only."""
        return self.sequence.context.tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended; None while it goes on."""
        return self.sequence.finish_reason

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Log-probabilities of the tokens so far; empty if they were not asked for."""
        return self.sequence.logprobs

    def prefill(self) -> None:
        """Run the prompt without its last token, in chunks, without logits."""
        while self.sequence.prefilling:
            self.advance()
        began = perf_counter()
        device_copies.wait(self._target.head_device)  # for what the prompt launched
        self.stats.seconds.prefill += perf_counter() - began

    def step(self) -> Step:
        """Take one step: a draft, a target forward, at least one token. The prompt must have been run."""
        self.advance()
        return self.steps[-1]

    def advance(self) -> None:
        """Take a step by itself, or run a chunk of its prompt; raises what ended it."""
        for _, outcome in self._learning.step((self,), _ANY):
            if isinstance(outcome, Exception):
                raise outcome

    def chunks(self) -> Iterator[Chunk]:
        """Run to the end, yielding each step; the model is unchanged while the caller has a chunk."""
        with self._target.active():
            self.prefill()
        while self.finish_reason is None:
            with self._target.active():
                step = self.step()
            yield self.chunk_of(step)

    def chunk_of(self, step: Step) -> Chunk:
        """The latest step as a piece of a stream."""
        return Chunk(self.sequence.ending.new_text(), step.tokens, step, self.finish_reason)

    def result(self) -> Generation:
        """The generation as it stands."""
        new, predicted, stats = self.tokens[self.stats.prompt_tokens :], self.sequence.context.prediction, self.stats
        if predicted:
            stats.accepted_prediction_tokens = accepted_count = appeared(predicted, new)
            stats.rejected_prediction_tokens = len(predicted) - accepted_count
        text, logprobs = self.sequence.ending.text, self.sequence.logprobs if self._logs else None
        return Generation(text, new, self.finish_reason or "unfinished", stats, self.steps, logprobs)

    def took(self, rows: ScheduledRows, verdict: Verdict, began: float, first_time: bool) -> Step:
        """Count a step that emitted tokens, and give the row policy its outcome; ``began``: when it began."""
        stats, policy, drafter = self.stats, self.sequence.context.policy, self.sequence.drafter
        assert rows.draft is not None
        if not self.steps:
            self._first_began = began
        tokens, count, self.asked = verdict.tokens, rows.step.rows, rows.asked
        stats.acceptance_lengths.append(len(tokens))
        stats.rows.append(count)
        step = Step(len(self.steps), tokens, count, drafter.name, None, first_time)
        self.steps.append(step)
        if self._traces:
            step.trace = self._trace(rows, step)
        if policy is not None and rows.asked:
            if drafter.plans_rows:  # it judges its rows itself
                policy.prices.learn(count, len(tokens), rows.step.lengths[0])
            else:
                policy.learn(rows.draft, verdict.path, rows.step.lengths[0])
        return step

    def _trace(self, rows: ScheduledRows, step: Step) -> StepTrace:
        """The trace of a step; accepted rows after the text's end are cut."""
        draft, session, accepted, count = rows.draft, self.sequence.session, rows.accepted, len(step.tokens)
        assert draft is not None
        sources = [self.sequence.drafter.name] * len(draft)
        if rows.asked and isinstance(session, MergingSession):
            sources = list(session.sources())
        sources[0] = "target"
        return StepTrace(
            tokens=list(draft.tokens),
            parents=list(draft.parents),
            sources=sources,
            path=accepted[:count],
            token_sources=[*(sources[row] for row in accepted[1 : count + 1]), "target"][:count],
            seconds=perf_counter() - self._first_began,
        )


class _Resting(NamedTuple):
    """Whether sequences take a plain step because drafting does not pay, and what was asked to know.

    Attributes:
        rests: the answer; for a step that only runs prompts, what would be answered.
        fallback: what was asked, or None; it judges one drafter.
        sequences, draws: how many sequences draft, and whether any of them samples.
    """

    rests: Rest = Rest.NONE
    fallback: Fallback | None = None
    sequences: int = 0
    draws: bool = False


_UNASKED = _Resting()
Outcome = tuple[Decoding, Step | Exception]
"""A generation, and the step that it took or the error that ended it."""


class Learning:
    """Takes steps of generations, times them, and tells of them whatever learns from time.

    What is compared, by the live curve and the fallback, is whole steps on a device, as a forward is only launched
    there and the copy out waits for it; on a CPU the curve gets the forwards. Steps with a first time in them are not
    compared, nor is a device's first step of each kind, in which libraries may load what they need.

    Args:
        engine: whose target runs the steps, and whose live cost curve and kinds of steps these are.
    """

    def __init__(self, engine: Setup) -> None:
        self._target, self._live, self._kinds = engine.target, engine.live, engine.step_kinds
        self._launches = engine.target.launches
        self._rows_each = 1.0  # of the drafts of the latest step
        self._runs: list[float] = []  # seconds of the step's forwards
        self._first_time = False

    def step(self, decodings: Sequence[Decoding], row_limit: int) -> list[Outcome]:
        """Take one step of these generations; returns the outcome of each that drafted or failed."""
        count, self._first_time = len(decodings), False
        self._runs.clear()
        load = BatchLoad(count, round((count - 1) * self._rows_each)) if count > 1 else UNBATCHED
        resting = self._resting(decodings)
        sequences = [decoding.sequence for decoding in decodings]
        prompts, began = [sequence.prefilling for sequence in sequences], perf_counter()
        results = step(sequences, self._run, row_limit=row_limit, load=load, resting=resting.rests)
        seconds, drafting = perf_counter() - began, 0.0
        for decoding, prompt in zip(decodings, prompts, strict=True):
            own, spent = decoding.drafting, decoding.stats.seconds
            if prompt:
                spent.prefill += own.seconds
            else:
                spent.draft += own.seconds
            drafting += own.seconds
            self._first_time |= own.first_time
            own.seconds, own.first_time = 0.0, False
        outcomes = self._count(decodings, results, began, max(seconds - drafting, 0.0))
        if outcomes and (self._live is not None or resting.fallback is not None):
            self._compare(results, resting, drafting, seconds)
        return outcomes

    def _run(self, steps: Sequence[StepInput]) -> list[StepOutput]:
        """Run rows of several sequences as one forward, and keep its time, which a device only takes to launch it."""
        began = perf_counter()
        target = self._target
        outputs = [target.forward(steps[0])] if len(steps) == 1 else run_steps(target, steps)
        self._runs.append(perf_counter() - began)
        self._first_time |= outputs[0].first_time
        return outputs

    def _resting(self, decodings: Sequence[Decoding]) -> _Resting:
        """Whether those that draft next rest. If sequences of several drafters share a forward, none of them rests."""
        drafting = [decoding for decoding in decodings if decoding.sequence.drafts]
        asked = drafting or decodings
        fallback = asked[0].fallback if asked else None
        if fallback is None or any(decoding.fallback is not fallback for decoding in asked):
            return _UNASKED
        draws = any(decoding.sequence.draws for decoding in asked)
        rests = Rest(fallback.rests(len(asked), draws))
        if self._launches and rests and any(decoding.asked for decoding in asked):
            # For what sessions launched when they observed: it belongs to drafted steps.
            device_copies.wait(self._target.head_device)
        # Of prompts' rows alone, or of drafts that waited, nothing can be compared.
        return _Resting(rests, fallback if drafting else None, len(asked), draws)

    def _count(
        self, decodings: Sequence[Decoding], results: Sequence[StepResult], began: float, seconds: float
    ) -> list[Outcome]:
        """Count the step with each generation; the forward's time is divided by rows, the rest equally.

        ``seconds``: of the step, without drafting.
        """
        ran = [result.rows.step.rows for result in results if result.rows is not None]
        forward, rows = sum(self._runs), sum(ran)
        rest = max(seconds - forward, 0.0) / max(len(results), 1)
        by_sequence, outcomes = {decoding.sequence: decoding for decoding in decodings}, list[Outcome]()
        for result in results:
            decoding, own, verdict = by_sequence[result.sequence], result.rows, result.verdict
            if result.error is not None:
                outcomes.append((decoding, result.error))
            elif own is not None and verdict is not None:
                stats, target = decoding.stats, forward * own.step.rows / rows
                stats.reused_tokens = decoding.sequence.reused
                if own.draft is None:
                    stats.seconds.prefill += target + rest
                    continue
                stats.seconds.target += target
                stats.seconds.rest += rest
                self._rows_each = rows / len(ran)
                outcomes.append((decoding, decoding.took(own, verdict, began, self._first_time)))
        return outcomes

    def _compare(self, results: Sequence[StepResult], resting: _Resting, drafting: float, seconds: float) -> None:
        """Tell the live curve and the fallback of the step, if it can be compared with others."""
        ran = [result.rows for result in results if result.rows is not None]
        tokens = [len(one.verdict.tokens) for one in results if one.verdict and one.rows and one.rows.draft is not None]
        if not tokens:
            return
        rows, whole = sum([own.step.rows for own in ran]), all(own.is_whole for own in ran)
        compared = not self._first_time
        if self._launches:
            kind = bucket(len(ran)), bucket(rows), whole, resting.rests, resting.draws
            compared &= kind in self._kinds
            self._kinds.add(kind)
        if not compared or len(tokens) != len(ran):
            return
        length = sum([own.step.lengths[0] for own in ran]) // len(ran)
        if self._live is not None and whole and (self._launches or len(self._runs) == 1):
            self._live.note(rows, length, max(seconds - drafting, 0.0) if self._launches else self._runs[0])
        if resting.fallback is not None and resting.sequences == len(tokens):
            resting.fallback.note(
                resting.sequences,
                resting.draws,
                tokens=sum(tokens),
                length=length,
                rows=rows,
                whole=whole,
                drafting=drafting,
                seconds=seconds,
            )
