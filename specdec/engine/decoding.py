"""A generation under way: its sequence, and the account that is kept of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Protocol

from specdec.costs.curve import CostCurve
from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.policy import RowPolicy
from specdec.drafter import Drafter, MergingSession
from specdec.engine.clocks import TimedDrafter
from specdec.engine.prediction import appeared
from specdec.engine.requests import Request
from specdec.engine.sequence import ScheduledRows, SequenceState
from specdec.engine.setup import Pricing, Setup
from specdec.engine.step import StepResult
from specdec.results import Chunk, Generation, Statistics, Step, StepTrace, TokenLogprobs
from specdec.step import device_copies

__all__ = ["Decoding", "Host"]


class Host(Setup, Protocol):
    """The attributes of an :class:`specdec.engine.engine.Engine` that its generations use."""

    drafter: Drafter
    costs: CostCurve
    live: LiveCosts | None
    fallback: Fallback | None
    step_kinds: set[Any]

    def row_policy(self, *, steady: bool = False) -> RowPolicy | None:
        """The row policy of a new sequence, or None; ``steady``: by the measured curve, not the live one."""

    def advance(self, decoding: Decoding) -> None:
        """Take one step of one generation by itself; raises what ended it."""


class Decoding:
    """A generation, made by ``Engine.begin`` and ``start``, and its statistics, steps and traces.

    One generation alone runs by ``prefill``, ``step`` and ``chunks``, inside ``target.active()``; many run in a
    :class:`specdec.engine.scheduler.Scheduler`.

    Attributes:
        sequence: its text and its part of the steps.
        drafting: the time of its session.
        stats, steps: counts, times and steps so far.
        fallback: decides whether the next step drafts; None if every step drafts.
        asked: whether the drafting session was asked for the latest draft.
    """

    def __init__(self, engine: Host, request: Request) -> None:
        drafter = TimedDrafter(engine.drafter)
        pricing = _pricing(engine, request)
        self._engine, self.drafting = engine, drafter.drafting
        self.fallback = None if pricing.isolated else engine.fallback
        self.sequence = SequenceState(engine, request, drafter, pricing)
        self.drafting.take()  # what the session read of a known beginning belongs to the prompt
        target, sampling = engine.target, self.sequence.context.sampling
        self.stats = Statistics(
            prompt_tokens=len(self.tokens),
            reused_tokens=self.sequence.reused,
            lossy=sampling.lossy,
            activations=target.options.get("activations"),
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
            self._engine.advance(self)
        began = perf_counter()
        device_copies.wait(self._engine.target.head_device)
        self.stats.seconds.prefill += perf_counter() - began

    def step(self) -> Step:
        """Take one step: a draft, a target forward, at least one token. The prompt must have been run."""
        self._engine.advance(self)
        return self.steps[-1]

    def chunks(self) -> Iterator[Chunk]:
        """Run to the end, yielding each step; the model is unchanged while the caller has a chunk."""
        target = self._engine.target
        with target.active():
            self.prefill()
        while self.finish_reason is None:
            with target.active():
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
        logprobs = self.sequence.logprobs if self._logs else None
        return Generation(
            self.sequence.ending.text, new, self.finish_reason or "unfinished", stats, self.steps, logprobs
        )

    def drafted(self, seconds: float, *, prompt: bool) -> None:
        """Count the time of its session in a step; ``prompt``: a step in which its prompt was run."""
        if prompt:
            self.stats.seconds.prefill += seconds
        else:
            self.stats.seconds.draft += seconds

    def took(self, result: StepResult, *, began: float, target: float, rest: float, first_time: bool) -> Step | None:
        """Count what a step did; returns the step, None for a chunk of the prompt.

        ``began``: when the step began; ``target`` and ``rest``: seconds of its rows in the forward, and its share of
        what was neither drafting nor the forward.
        """
        rows, verdict, stats = result.rows, result.verdict, self.stats
        assert rows is not None
        assert verdict is not None
        stats.reused_tokens, spent = self.sequence.reused, stats.seconds
        if rows.draft is None:
            spent.prefill += target + rest
            return None
        if not self.steps:
            self._first_began = began
        spent.target += target
        spent.rest += rest
        stats.acceptance_lengths.append(len(verdict.tokens))
        stats.rows.append(rows.step.rows)
        step = Step(len(self.steps), verdict.tokens, rows.step.rows, self.sequence.drafter.name, None, first_time)
        self.steps.append(step)
        if self._traces:
            step.trace = self._trace(rows, step)
        self.asked = rows.asked
        self._learn(result)
        return step

    def _learn(self, result: StepResult) -> None:
        """Give the row policy the step's outcome."""
        rows, verdict, policy = result.rows, result.verdict, self.sequence.context.policy
        if policy is None or rows is None or verdict is None or rows.draft is None or not rows.asked:
            return
        if self.sequence.drafter.plans_rows:  # it judges its rows itself
            policy.prices.learn(rows.step.rows, len(verdict.tokens), rows.step.lengths[0])
        else:
            policy.learn(rows.draft, verdict.path, rows.step.lengths[0])

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


def _pricing(engine: Host, request: Request) -> Pricing:
    """The costs of rows that a sequence's drafting session gets."""
    sampling, live = request.sampling, engine.live
    assert sampling is not None
    draws = sampling.temperature > 0 if request.sample is None else request.sample
    # Under ``reject`` the text at a seed depends on the proposed rows. It must not depend on other sequences or on the
    # time of forwards, so the rows must not either.
    rejects = sampling.acceptance == "reject" or (sampling.acceptance == "auto" and engine.drafter.draws)
    isolated = sampling.acceptance == "typical" or (draws and rejects)
    policy = engine.row_policy(steady=isolated)
    steady = isolated or policy is None
    return Pricing(policy, engine.costs if steady or live is None else live.now, isolated)
