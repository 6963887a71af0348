"""A sequence: one generation under way, and the parts of a step that are its own.

Between steps ``cache.length == len(tokens) - 1``: the last token is the root of the next draft, and its keys and values
are computed with it. Prefill is a step whose rows are all known, so the first step of a text is an ordinary one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, cast

from specdec.costs.curve import CostCurve
from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.policy import RowPolicy
from specdec.costs.prices import UNBATCHED, BatchLoad
from specdec.drafter import BatchedSession, Context, Drafter, DraftSession, MergingSession, Observation
from specdec.drafting.joint_forward import ForwardRows
from specdec.drafting.sessions import propose_at_once, proposing, session_of, top_k_of
from specdec.engine.device_step import DeviceVerification
from specdec.engine.prediction import appeared
from specdec.engine.prefix_cache import KeptText, PrefixCache
from specdec.engine.requests import Request
from specdec.engine.text_stream import TextStream
from specdec.errors import DraftError
from specdec.parallel.rows import ShardedTarget, ShardedVerification
from specdec.parallel.target import ParallelTarget
from specdec.results import Chunk, Generation, Statistics, Step, StepTrace, TokenLogprobs
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import Readback, Verdict, Verification, match, verifier_for
from specdec.step import device_copies
from specdec.step.block import Block
from specdec.step.forward_passes import Passes, timed
from specdec.step.tree import Draft
from specdec.target import Target, TargetOutput

__all__ = ["ScheduledRows", "SequenceState", "Setup", "cache_sizes"]


class Setup(Protocol):
    """The attributes of an :class:`specdec.engine.engine.Engine` that a sequence uses."""

    target: Target
    tokenizer: Any
    drafter: Drafter
    max_rows: int
    costs: CostCurve
    live: LiveCosts | None
    fallback: Fallback | None
    step_kinds: set[Any]

    @property
    def chunk_rows(self) -> int:
        """Most tokens of a prompt that go through one forward."""

    def row_policy(self, *, steady: bool = False) -> RowPolicy | None:
        """The row policy of a new sequence, or None; ``steady``: by the measured curve, not the live one."""

    def advance(self, sequence: SequenceState) -> None:
        """Take one step of one sequence by itself; raises what ended it."""


@dataclass(slots=True, eq=False)
class ScheduledRows(ForwardRows):
    """The rows that one sequence has in a forward of the target: a draft, or a chunk of its prompt.

    Attributes:
        sequence: the sequence.
        draft: as proposed; None for a chunk of the prompt.
        asked: whether the drafting session proposed the draft. A plain step while drafting rests is shown to the
            session as a chunk of the prompt is.
        readback: tensors that verification reads from a device, if they were copied together with other sequences'.
        accepted: the path that verification found, before the text's end cut it.
        drafting, making: seconds spent on proposing the draft, and on turning it into rows of a forward.
    """

    sequence: SequenceState = field(kw_only=True)
    draft: Draft | None = None
    asked: bool = False
    drafting: float = 0.0
    making: float = 0.0
    readback: Readback | None = None
    accepted: Sequence[int] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the rows are a draft that goes through all layers and gets logits for every row."""
        return self.draft is not None and self.entry is None and self.rows is None


class SequenceState:
    """One generation under way, of a request that ``Engine.prepare`` gave; made by ``Engine.begin`` and ``start``.

    :func:`specdec.engine.step.step` calls ``propose``, ``chunk``, ``read``, ``verify``, ``commit``, ``observe`` and
    ``learn``. One sequence alone runs by ``prefill``, ``step`` and ``chunks``; many run in a
    :class:`specdec.engine.scheduler.Scheduler`. The caller holds ``target.active()`` around either.

    Attributes:
        context: text, cache, sampling and bounds, as the drafting session sees them. The sampler reads the same text.
        drafter, stats, steps: of the sequence.
        draws: whether its tokens are sampled.
        fallback: decides whether the next step drafts; None if every step drafts.
        prefilling: whether tokens of the prompt before the last one have still to be run.
        asked: whether the drafting session was asked for the latest draft.
        scheduled: a draft that has not been run yet because a forward had no room for it.
        finish_reason: why the text ended; None while it goes on.
    """

    def __init__(self, engine: Setup, request: Request) -> None:
        target, tokens, sampling = engine.target, [*cast(list[int], request.prompt)], request.sampling
        assert sampling is not None
        assert request.eos_ids is not None
        assert isinstance(request.stop_token_ids, frozenset)
        target.check_unchanged()
        self._engine, self._target, self.drafter = engine, target, engine.drafter
        self._sampler = Sampler(
            sampling, tokens, target.vocab_size, target.head_device, request.logits_processor, request.sample
        )
        self.draws, self._drawing = self._sampler.sample, self._sampler.draws
        # Under ``reject`` the text at a seed depends on the proposed rows. It must not depend on other sequences or on
        # the time of forwards, so the rows must not either.
        rejects = sampling.acceptance == "reject" or (sampling.acceptance == "auto" and self.drafter.draws)
        isolated = sampling.acceptance == "typical" or (self.draws and rejects)
        policy, live = engine.row_policy(steady=isolated), engine.live
        self.fallback = None if isolated else engine.fallback
        steady = isolated or policy is None
        self._tells, self._top_k = bool(self.drafter.taps) or self.drafter.needs_observe, top_k_of(self.drafter)
        self._stop_when, self._eos_ids = request.stop_when, request.eos_ids
        self._stop_token_ids, self._ends = request.stop_token_ids, request.eos_ids | request.stop_token_ids
        self._text = (
            None
            if engine.tokenizer is None
            else TextStream(engine.tokenizer, [*request.stop], tokens, min_tokens=request.min_tokens)
        )
        self._end, rows = cache_sizes(engine, len(tokens), request.max_new_tokens)
        self._end_reason = "length" if self._end == len(tokens) + request.max_new_tokens else "context"
        self._chunk = engine.chunk_rows
        cache = target.new_cache(capacity=self._end, rows=rows)
        cache.grow(len(tokens))
        self.context = Context(
            target=target,
            cache=cache,
            tokens=tokens,
            prompt_length=len(tokens),
            remaining=self._end - len(tokens),
            max_rows=request.max_rows or engine.max_rows,
            sampling=sampling,
            noise=self._sampler.noise,
            rng=random.Random(sampling.seed),
            costs=engine.costs if steady or live is None else live.now,
            policy=policy,
            isolated=isolated,
            prediction=cast(Sequence[int], request.prediction or ()),
        )
        self._batch_load = UNBATCHED
        self._session = session_of(self.drafter, self.context)
        self._asks = self.drafter.proposes or self._tells
        self._batched = isinstance(self._session, BatchedSession)
        reads_scores = self._tells or request.logprobs is not None
        self._verification = _verification(target, self._sampler, self._session, self._top_k, reads_scores)
        self.finish_reason: str | None = None
        activations = getattr(target, "options", {}).get("activations")
        self.stats = Statistics(prompt_tokens=len(tokens), lossy=sampling.lossy, activations=activations)
        self.steps: list[Step] = []
        self.scheduled: ScheduledRows | None = None
        self.asked = False
        self._traces, self._first_began = request.trace, 0.0
        self._top = request.logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._prefix_cache = request.prefix_cache
        self._kept = None if request.prefix_cache is None else self._take(request.prefix_cache)
        self.prefilling = cache.length < len(tokens) - 1
        if isinstance(target, ParallelTarget):
            target.greet(self._sampler, **self._told(request))

    def _told(self, request: Request) -> dict[str, Any]:
        """What decides the text besides model, prompt and sampling: all ranks that run it compare this."""
        tokenizer, drafter = self._engine.tokenizer, self.drafter
        spelled = None if tokenizer is None else (type(tokenizer).__qualname__, getattr(tokenizer, "vocab_size", None))
        return {
            "the_stops": (set(request.stop), spelled, request.stop_when),
            "the_stop_tokens": (self._stop_token_ids, self._eos_ids),
            "the_length": self._end,
            "the_rows": (self._chunk, self.context.max_rows),
            "the_drafter": (drafter.name, drafter.taps, drafter.needs_observe, self._top_k),
            "the_prediction": self.context.prediction,
            "the_logprobs": request.logprobs,
        }

    def look_again(self) -> None:
        """Look into the prefix cache again if nothing of the prompt has run: others may have run its beginning."""
        if self._prefix_cache is not None and not self.context.cache.length:
            self._kept = self._take(self._prefix_cache)
            self.prefilling = self.context.cache.length < self.stats.prompt_tokens - 1

    def _take(self, prefix_cache: PrefixCache) -> KeptText:
        """Copy the prompt's known beginning from the prefix cache; the session observes it as if it had just run."""
        with self._target.active():
            text, taps = prefix_cache.begin(self._target, self.context.cache, self.tokens, self.drafter.taps)
            self.stats.reused_tokens = known = self.context.cache.length
            for start in range(0, known if taps else 0, self._chunk):
                part = slice(start, min(start + self._chunk, known))
                chunk, seen = self.tokens[part], {layer: hidden[part] for layer, hidden in taps.items()}
                self._session.observe(Observation(None, range(len(chunk)), chunk, taps=seen))
        return text

    @property
    def tokens(self) -> list[int]:
        """Prompt and text. Read only."""
        return self.context.tokens

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Log-probabilities of the tokens so far; empty if they were not asked for."""
        return self._logprobs

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's cache."""
        return self.context.cache.nbytes

    def prefill(self) -> None:
        """Run the prompt without its last token, in chunks, without logits."""
        while self.prefilling:
            self._engine.advance(self)
        began = perf_counter()
        device_copies.wait(self._target.head_device)
        self.stats.seconds.prefill += perf_counter() - began

    def step(self) -> Step:
        """Take one step: a draft, a target forward, at least one token. The prompt must have been run."""
        self._engine.advance(self)
        return self.steps[-1]

    def chunk(self, most: int) -> ScheduledRows:
        """The next tokens of the prompt, at most ``most``."""
        began, cache = perf_counter(), self.context.cache
        start, size = cache.length, min(self._chunk, most)
        known = self.tokens[start : min(start + size, self.stats.prompt_tokens - 1)]
        block = Block(cache, known, device=self._target.device, backend=self._target.backend, again=False)
        taps = self.drafter.taps
        return ScheduledRows(block, (), taps=taps, top_k=0, sequence=self, making=perf_counter() - began)

    def propose(self, batch_load: BatchLoad, rests: bool) -> ScheduledRows | Passes[ScheduledRows]:
        """The next draft, or the passes that its session waits for; ``rests``: the root alone."""
        context = self.context
        self._batch_load = UNBATCHED if context.isolated else batch_load
        row_budget = self._row_budget(rests)
        began = perf_counter() - context.waited.others  # without the time of other sequences meanwhile
        if rests or context.remaining <= 1 or not self._asks:
            return self._scheduled(Draft.root(context.tokens[-1]), False, began)
        if self._batched:
            return self._drafting(row_budget)
        draft = propose_at_once(self._session, row_budget, self.drafter.name, self._target)
        self._check(draft, row_budget)
        return self._scheduled(draft, True, began)

    def _drafting(self, row_budget: int) -> Passes[ScheduledRows]:
        """The next draft of a session that waits for passes."""
        waited = self.context.waited
        began = perf_counter() - waited.others  # others' sessions may have drafted since this generator was made
        passes = proposing(self._session, row_budget, self.drafter.name, self._target)
        draft = yield from timed(passes, waited, together=not self.context.isolated)
        self.stats.seconds.passes = waited.passes
        self._check(draft, row_budget)
        return self._scheduled(draft, True, began)

    def _scheduled(self, draft: Draft, asked: bool, began: float) -> ScheduledRows:
        """A draft as rows of a forward; ``began``: when drafting started."""
        self.asked = asked
        if self._traces and not self.steps:
            self._first_began = began
        context, target, draft = self.context, self._target, self._verification.prepare(draft)
        drafted_at, scored = perf_counter(), draft.scored_rows()
        sent = self._verification.arrays(draft, scored)
        block = Block.of(draft, context.cache, target.device, target.backend, sent)
        if self.draws and verifier_for(context.sampling, draft, sampling=True) is match:
            if block.apart:
                block.draws = self._drawing
            else:
                block.draw = self._sampler.next_draw
        if block.apart and self._verification.decides(draft):
            block.decides, block.probes = True, draft.probes
        return ScheduledRows(
            block,
            scored,
            draft.entry,
            self.drafter.taps,
            self._top_k if asked else 0,
            draft,
            asked,
            drafted_at - context.waited.others - began,
            perf_counter() - drafted_at,
            sequence=self,
        )

    def _row_budget(self, rests: bool) -> int:
        """Rows that the next draft may have."""
        context, policy = self.context, self.context.policy
        row_budget = min(context.max_rows, context.cache.free)
        context.remaining = self._end - len(context.tokens)
        if policy is not None:
            policy.prices.batch_load = self._batch_load
            if not (rests or self.drafter.plans_rows):
                row_budget = policy.row_budget(row_budget, context.cache.length)
        return row_budget

    def read(self, rows: ScheduledRows, output: TargetOutput) -> Readback | None:
        """The tensors to copy from a device before ``verify``; None if it reads them itself."""
        return None if rows.draft is None else self._verification.read(rows.draft, rows.rows, rows.block, output)

    def verify(self, rows: ScheduledRows, output: TargetOutput) -> Verdict:
        """The accepted rows and the emitted tokens, cut where the text ends; for a chunk all of its rows."""
        if rows.draft is None:
            return Verdict(range(rows.block.rows), rows.block.ids)
        if rows.readback is not None:
            verdict = rows.readback.verdict()
        else:
            verdict = self._verification.verify(rows.draft, rows.rows, rows.block, output)
        rows.accepted = verdict.path
        verdict.cut(self._cut(verdict.tokens))
        if self._top is not None:
            assert verdict.scores is not None
            self._logprobs += verdict.scores.logprobs(verdict.path, verdict.tokens, self._top)
        return verdict

    def commit(self, rows: ScheduledRows, verdict: Verdict, output: TargetOutput) -> None:
        """Append the accepted rows to the cache and the emitted tokens to the text."""
        context = self.context
        context.cache.commit(verdict.path, moved=rows.block.moved)
        if rows.draft is not None:
            context.tokens += verdict.tokens
        elif context.cache.length == context.prompt_length - 1:
            self.prefilling = False
        if self._kept is not None:
            self._kept.keep(output.taps, verdict.path)

    def observe(self, rows: ScheduledRows, verdict: Verdict, output: TargetOutput) -> None:
        """Show the drafting session what became of its draft."""
        if self.finish_reason is not None:
            if self._kept is not None:
                self._kept.end()
            return
        if not rows.asked:
            if self.drafter.taps:
                self._session.observe(Observation(None, verdict.path, rows.block.ids, taps=output.taps))
        elif self._tells:
            path, tokens = verdict.path, verdict.tokens
            self._session.observe(Observation(rows.draft, path, tokens, verdict.scores, output.taps, verdict.readback))

    def learn(self, rows: ScheduledRows, verdict: Verdict) -> None:
        """Give the row policy the step's outcome, and the step its trace."""
        if self._traces:
            self.steps[-1].trace = self._trace(rows, self.steps[-1])
        policy, length = self.context.policy, rows.block.length
        if policy is None or not rows.asked:
            return
        assert rows.draft is not None
        policy.prices.batch_load = self._batch_load
        if self.drafter.plans_rows:  # it judges its rows itself
            policy.prices.learn(rows.block.rows, len(verdict.tokens), length)
        else:
            policy.learn(rows.draft, verdict.path, length)

    def _trace(self, rows: ScheduledRows, step: Step) -> StepTrace:
        """The trace of a step; accepted rows after the text's end are cut."""
        draft, session, accepted, count = rows.draft, self._session, rows.accepted, len(step.tokens)
        assert draft is not None
        sources = [self.drafter.name] * len(draft)
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

    def result(self) -> Generation:
        """The generation as it stands."""
        new, predicted = self.tokens[self.stats.prompt_tokens :], self.context.prediction
        if predicted:
            self.stats.accepted_prediction_tokens = accepted_count = appeared(predicted, new)
            self.stats.rejected_prediction_tokens = len(predicted) - accepted_count
        text = "" if self._text is None else self._text.text
        logprobs = None if self._top is None else self._logprobs
        return Generation(text, new, self.finish_reason or "unfinished", self.stats, self.steps, logprobs)

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
        assert self._text is not None
        text = self._text.take() if self.finish_reason is None else self._text.finish()
        return Chunk(text, step.tokens, step, self.finish_reason)

    def _check(self, draft: Draft, row_budget: int) -> None:
        """Raises DraftError where a draft breaks a rule that exactness depends on."""
        tokens, last, size = draft.tokens, self.tokens[-1], self._target.vocab_size
        if len(tokens) > row_budget:
            raise DraftError(
                f"draft has {len(tokens)} rows but {row_budget} slots are free; propose at most `row_budget` rows "
                f"(drafter {self.drafter.name!r}), lower its sizes, or raise the engine's max_rows"
            )
        if type(tokens) is device_copies.Later:
            return  # a model drew them from the vocabulary, and to check them here would wait for the device
        if tokens[0] != last:
            raise DraftError(
                f"the draft's root is token {tokens[0]}, the last emitted token is {last}; "
                f"row 0 must be context.root (drafter {self.drafter.name!r})"
            )
        if not 0 <= min(tokens) <= max(tokens) < size:
            raise DraftError(f"drafter {self.drafter.name!r} proposed a token outside the vocabulary [0, {size})")

    def _cut(self, tokens: Sequence[int]) -> int:
        """How many of the accepted tokens plain decoding would have emitted; sets the finish reason."""
        text = self._text
        watched = self._stop_when is not None or (text is not None and text.watches)
        if not watched and self._ends.isdisjoint(tokens) and len(self.context.tokens) + len(tokens) < self._end:
            if text is not None:
                text.extend(tokens)
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            stopped = (text is not None and text.push(token)) or token in self._stop_token_ids
            if token in self._eos_ids:
                self.finish_reason = "eos"
            elif stopped or (self._stop_when is not None and self._stop_when([*self.context.tokens, *tokens[:count]])):
                self.finish_reason = "stop"
            elif len(self.context.tokens) + count == self._end:
                self.finish_reason = self._end_reason
            if self.finish_reason is not None:
                return count
        return len(tokens)


def _verification(
    target: Target, sampler: Sampler, session: DraftSession, top_k: int, reads_scores: bool
) -> Verification:
    """How a sequence's drafts are verified: on the host, on a device, or by several processes together."""
    if isinstance(target, ShardedTarget):
        return ShardedVerification(target, sampler, top_k)
    apart = device_copies.is_apart(target.device) and device_copies.is_apart(target.head_device)
    if apart and not isinstance(target, ParallelTarget):
        return DeviceVerification(sampler, session, top_k, reads_scores=reads_scores)
    return Verification(sampler)


def cache_sizes(engine: Setup, prompt_tokens: int, max_new_tokens: int) -> tuple[int, int]:
    """Most tokens of a text, prompt and all, and most rows of one of its forwards."""
    end = min(prompt_tokens + max_new_tokens, engine.target.context_length)
    return end, max(engine.max_rows, min(engine.chunk_rows, prompt_tokens))
