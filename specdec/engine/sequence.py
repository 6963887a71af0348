"""Decoding: one generation under way, one turn after the other.

A turn is what a sequence brings to a forward: a chunk of its prompt, or a draft. It is made, the target runs it, by
itself or together with other sequences' turns, and what comes back is verified and committed. Between turns that are
drafts ``cache.length == len(tokens) - 1``: the last token is the root of the next draft, and its keys and values are
computed with it. Prefill is a step whose rows are all known, so the first step is an ordinary one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from specdec.costs.curve import CostCurve
from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.policy import RowPolicy
from specdec.costs.prices import UNBATCHED, BatchLoad
from specdec.drafter import Context, DeviceStep, Drafter, MergingSession, Observation, ReadbackSession
from specdec.drafting.joint_forward import ForwardRows, forward_together
from specdec.drafting.sessions import proposing, session_of, top_k_of
from specdec.engine.prediction import appeared
from specdec.engine.prefix_cache import KeptText, PrefixCache
from specdec.engine.requests import Request
from specdec.engine.text_stream import TextStream
from specdec.errors import DraftError
from specdec.parallel.target import ParallelTarget
from specdec.results import Chunk, Generation, Statistics, Step, StepTrace, TokenLogprobs
from specdec.sampling.sampler import Sampler
from specdec.sampling.scores import Scores
from specdec.sampling.verify import Verdict, last_row, look, match, reject, verifier_for, walk_arrays
from specdec.step import device_copies
from specdec.step.block import Block
from specdec.step.forward_passes import Passes, alone, timed
from specdec.step.tree import Draft
from specdec.target import Target, TargetOutput

__all__ = ["ScheduledRows", "SequenceState", "Setup", "cache_sizes"]


class Setup(Protocol):
    """What a decoding needs of an engine, see :class:`specdec.engine.engine.Engine`."""

    target: Target
    tokenizer: Any
    drafter: Drafter
    max_rows: int
    costs: CostCurve
    live: LiveCosts | None
    fallback: Fallback | None

    @property
    def chunk_rows(self) -> int:
        """Most tokens of a prompt that go through one forward."""

    def row_policy(self, *, steady: bool = False) -> RowPolicy | None:
        """What decides on the rows of a new sequence, if anything does.

        ``steady``: by the curve as it was measured.
        """


@dataclass(slots=True, eq=False)
class ScheduledRows(ForwardRows):
    """What one sequence brings to a forward of the target.

    Attributes:
        draft: as proposed; None for a chunk of the prompt.
        asked: whether the session proposed it; of others it is told no more than of the prompt.
        drafting: seconds that it took to propose.
        made: when it was there, on the clock of ``perf_counter``.
    """

    draft: Draft | None = None
    asked: bool = True
    drafting: float = 0.0
    made: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether its rows are a draft's that go through all layers and all get logits, as in a measured forward."""
        return self.draft is not None and self.entry is None and self.rows is None


class SequenceState:
    """One generation under way. Made by ``Engine.start``; the caller holds ``target.active()`` around its methods.
    Its request is one that ``Engine.prepare`` gave.

    ``prefill`` and ``step`` drive it by itself. To drive several together, take each one's ``chunk`` or ``drafting``,
    run the turns in one forward, and hand each its part of the output in ``absorb`` or ``conclude``.

    Attributes:
        tokens: prompt and text.
        prefilling: whether the prompt, but its last token, has still to be run.
        finish_reason: why it ended; None while it goes on.
        fallback: what says when it does not draft, if its steps may go by that; an engine's sequences share one.
    """

    def __init__(self, engine: Setup, request: Request) -> None:
        target, prompt, sampling = engine.target, cast(list[int], request.prompt), request.sampling
        assert sampling is not None
        assert request.eos_ids is not None
        assert isinstance(request.stop_token_ids, frozenset)
        target.check_unchanged()
        self._target, self._drafter = target, engine.drafter
        self.tokens = prompt.copy()
        self.sampler = Sampler(
            sampling, self.tokens, target.vocab_size, target.head_device, request.logits_processor, request.sample
        )
        # Where the text at a seed depends on the rows that are proposed, as under ``reject``, it must depend neither on
        # other sequences nor on what forwards take, and so the rows must not either.
        rejects = sampling.acceptance == "reject" or (sampling.acceptance == "auto" and self._drafter.draws)
        self._by_rows = sampling.acceptance == "typical" or (self.sampler.sample and rejects)
        self._policy, self._live = engine.row_policy(steady=self._by_rows), engine.live
        self.fallback = None if self._by_rows else engine.fallback
        steady = self._by_rows or self._policy is None
        self._batch_load = UNBATCHED
        self._tells = bool(engine.drafter.taps) or engine.drafter.needs_observe
        self._top_k = top_k_of(engine.drafter)
        self._stop_when, self._eos_ids = request.stop_when, request.eos_ids
        self._stop_token_ids, self._ends = request.stop_token_ids, request.eos_ids | request.stop_token_ids
        self._text = None if engine.tokenizer is None else TextStream(engine.tokenizer, [*request.stop], prompt)
        self._end, rows = cache_sizes(engine, len(prompt), request.max_new_tokens)
        self._end_reason = "length" if self._end == len(prompt) + request.max_new_tokens else "context"
        self._chunk = engine.chunk_rows
        self._cache = target.new_cache(capacity=self._end, rows=rows)
        self._cache.grow(len(prompt))
        self._context = Context(
            target=target,
            cache=self._cache,
            tokens=self.tokens,
            prompt_length=len(prompt),
            remaining=self._end - len(prompt),
            max_rows=request.max_rows or engine.max_rows,
            sampling=sampling,
            noise=self.sampler.noise,
            rng=random.Random(sampling.seed),
            costs=engine.costs if steady or self._live is None else self._live.now,
            policy=self._policy,
            isolated=self._by_rows,
            prediction=cast(Sequence[int], request.prediction or ()),
        )
        self._session = session_of(self._drafter, self._context)
        # Of several processes none decides by itself what its rows say.
        apart = device_copies.is_apart(target.device) and device_copies.is_apart(target.head_device)
        self._apart = apart and not isinstance(target, ParallelTarget)
        self._reads_back = self._apart and isinstance(self._session, ReadbackSession)
        self.finish_reason: str | None = None
        self.stats = Statistics(prompt_tokens=len(prompt), lossy=sampling.lossy)
        self.steps: list[Step] = []
        self._traces, self._first_began = request.trace, 0.0
        self._top = request.logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._kept = None if request.prefix_cache is None else self._take(request.prefix_cache)
        self.prefilling = self._cache.length < len(prompt) - 1

    def _take(self, prefix_cache: PrefixCache) -> KeptText:
        """Have what is known of the prompt's beginning; the session is shown it as if it had just been run."""
        with self._target.active():
            text, taps = prefix_cache.begin(self._target, self._cache, self.tokens, self._drafter.taps)
            self.stats.reused_tokens = known = self._cache.length
            for start in range(0, known if taps else 0, self._chunk):
                part = slice(start, min(start + self._chunk, known))
                chunk, seen = self.tokens[part], {layer: hidden[part] for layer, hidden in taps.items()}
                self._session.observe(Observation(None, range(len(chunk)), chunk, taps=seen))
        return text

    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Of the tokens so far; empty if they were not asked for."""
        return self._logprobs

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's cache."""
        return self._cache.nbytes

    def prefill(self) -> None:
        """Run the prompt but its last token, in chunks, with no logits."""
        while self.prefilling:
            scheduled = self.chunk()
            output = self._run(scheduled)
            self.absorb(scheduled, output, perf_counter() - scheduled.made)
        began = perf_counter()
        device_copies.wait(self._target.head_device)
        self.stats.seconds.prefill += perf_counter() - began

    def step(self) -> Step:
        """One draft, one target forward, at least one token."""
        fallback, drawn, length = self.fallback, self.sampler.sample, self._cache.length
        scheduled = alone(self.drafting(rests=fallback is not None and fallback.rests(1, drawn)))
        output = self._run(scheduled)
        seconds, drafted = perf_counter() - scheduled.made, self.stats.seconds.draft
        rows, whole = scheduled.block.rows, scheduled.is_whole
        if self._live is not None and whole:
            self._live.note(rows, length, seconds)
        step = self.conclude(scheduled, output, seconds)
        if fallback is not None:
            fallback.note(
                1,
                drawn,
                tokens=len(step.tokens),
                length=length,
                rows=rows,
                whole=whole,
                drafting=self.stats.seconds.draft - drafted,
                seconds=scheduled.drafting + perf_counter() - scheduled.made,
            )
        return step

    def _run(self, scheduled: ScheduledRows) -> TargetOutput:
        (output,) = forward_together(self._target, [scheduled])
        return output

    def chunk(self, most: int | None = None) -> ScheduledRows:
        """The next tokens of the prompt, at most so many."""
        made, start = perf_counter(), self._cache.length
        size = self._chunk if most is None else min(self._chunk, most)
        known = self.tokens[start : min(start + size, self.stats.prompt_tokens - 1)]
        block = Block(self._cache, known, device=self._target.device, backend=self._target.backend, again=False)
        return ScheduledRows(block, (), taps=self._drafter.taps, top_k=0, made=made)

    def absorb(self, scheduled: ScheduledRows, output: TargetOutput, seconds: float) -> None:
        """Commit a chunk of the prompt that was run, in so many seconds."""
        began, start, rows = perf_counter(), self._cache.length, range(scheduled.block.rows)
        self._cache.commit(rows)
        self.prefilling = self._cache.length < self.stats.prompt_tokens - 1
        if self._kept is not None:
            self._kept.keep(output.taps, rows)
        if self._drafter.taps:
            self._session.observe(Observation(None, rows, self.tokens[start : start + len(rows)], taps=output.taps))
        self.stats.seconds.prefill += seconds + perf_counter() - began

    def drafting(self, batch_load: BatchLoad = UNBATCHED, rests: bool = False) -> Passes[ScheduledRows]:
        """The next draft, in the making: the passes that the session waits for, to be run beside others'.

        ``batch_load``: those who share the next forward. ``rests``: it is to be a plain step, and the session is not
            asked.
        """
        self._batch_load = UNBATCHED if self._by_rows else batch_load
        waited, row_budget = self._context.waited, self._row_budget(rests)
        began = perf_counter() - waited.others  # what others take meanwhile is left out
        asked = not rests and self._context.remaining > 1
        if asked:
            passes = proposing(self._session, row_budget, self._drafter.name, self._target)
            draft = yield from timed(passes, waited, together=not self._by_rows)
            self.stats.seconds.passes = waited.passes
        else:
            draft = Draft.chain(self.tokens[-1:])
        self._check(draft, row_budget)
        if type(draft.tokens) is device_copies.Later and (self.sampler.reads_drafts or not self._apart):
            draft = replace(draft, tokens=list(draft.tokens))  # now, before the device has the target's rows to run
        made, rows = perf_counter(), draft.scored_rows()
        sent = self._arrays(draft, rows) if self._apart else None
        block = Block.of(draft, self._cache, self._target.device, self._target.backend, sent)
        if self.sampler.sample and verifier_for(self.sampler.params, draft, sampling=True) is match:
            block.draw = self.sampler.next_draw
        taps, top_k = self._drafter.taps, self._top_k if asked else 0
        return ScheduledRows(
            block, rows, draft.entry, taps, top_k, draft, asked, drafting=made - waited.others - began, made=made
        )

    def _row_budget(self, rests: bool) -> int:
        """Rows that the next draft may have."""
        cache, policy = self._cache, self._policy
        row_budget = min(self._context.max_rows, cache.free)
        self._context.remaining = self._end - len(self.tokens)
        if policy is not None:
            policy.prices.batch_load = self._batch_load
            if not (rests or self._drafter.plans_rows):
                row_budget = policy.row_budget(row_budget, cache.length)
        return row_budget

    def _arrays(self, draft: Draft, rows: Sequence[int] | None) -> dict[str, npt.NDArray[Any]]:
        """What a step on a device needs there beside its rows; it goes in the same copy."""
        arrays = walk_arrays(draft, Scores(torch.empty(0), rows).place) if self._reads_back else {}
        if rows is not None:
            arrays["rows"] = np.array(rows, dtype=np.int64)
        unread = self.sampler.unread
        if unread is not None and self.sampler.takes_together:
            arrays["unread"] = np.array(unread, dtype=np.int64)
            arrays["paths"] = _paths(draft, range(len(draft)) if rows is None else rows)
        return arrays

    def conclude(self, scheduled: ScheduledRows, output: TargetOutput, seconds: float) -> Step:
        """Verify a draft that was run, in so many seconds, and commit what of it is the text."""
        draft, began, cache, stats = scheduled.draft, perf_counter(), self._cache, self.stats
        assert draft is not None
        length, rows = cache.length, scheduled.block.rows
        scores, verdict, readback = (
            self._copy_out(scheduled.block, draft, output) if self._apart else (None, None, None)
        )
        if scores is None or verdict is None:
            verdict, scores = self._target.verify(output, draft, self.sampler, self._top_k, scores)
        accepted = verdict.path
        verdict = verdict.cut(self._cut(verdict.tokens))
        if self._top is not None:
            self._logprobs += scores.logprobs(verdict.path, verdict.tokens, self._top)
        verified = perf_counter()

        path, tokens = verdict.path, verdict.tokens
        cache.commit(path)
        self.tokens += tokens
        if self._kept is not None:
            self._kept.keep(output.taps, path)
        committed = perf_counter()
        if self._tells and self.finish_reason is None:
            if scheduled.asked:
                self._session.observe(Observation(draft, path, tokens, scores, output.taps, readback))
            elif self._drafter.taps:
                self._session.observe(Observation(None, path, draft.tokens, taps=output.taps))
        step = Step(len(self.steps), tokens, rows, self._drafter.name)
        if self._traces:
            step.trace = self._trace(scheduled, accepted, step)
        self.steps.append(step)
        stats.acceptance_lengths.append(len(tokens))
        stats.rows.append(rows)
        if self._kept is not None and self.finish_reason is not None:
            self._kept.end()
        observed = perf_counter()
        spent, drafting = stats.seconds, scheduled.drafting + observed - committed
        spent.draft += drafting
        spent.target += seconds
        spent.verify += verified - began
        spent.other += committed - verified
        if self._policy is not None and scheduled.asked:
            self._policy.prices.batch_load = self._batch_load
            if self._drafter.plans_rows:  # it judges its rows itself
                self._policy.prices.learn(rows, len(tokens), length)
            else:
                self._policy.learn(draft, path, length)
        return step

    def _trace(self, scheduled: ScheduledRows, accepted: Sequence[int], step: Step) -> StepTrace:
        """What a step's tree was; of the ``accepted`` rows those behind the text's end count as where it came from."""
        draft, session, name = scheduled.draft, self._session, self._drafter.name
        assert draft is not None
        if not self.steps:
            self._first_began = scheduled.made - scheduled.drafting
        sources = [name] * len(draft)
        if scheduled.asked and isinstance(session, MergingSession):
            sources = list(session.sources())
        sources[0] = "target"
        return StepTrace(
            tokens=list(draft.tokens),
            parents=list(draft.parents),
            sources=sources,
            path=accepted[: len(step.tokens)],
            token_sources=[*(sources[row] for row in accepted[1 : len(step.tokens) + 1]), "target"][: len(step.tokens)],
            seconds=perf_counter() - self._first_began,
        )

    def _copy_out(
        self, block: Block, draft: Draft, output: TargetOutput
    ) -> tuple[Scores | None, Verdict | None, list[int] | None]:
        """Decide all rows on the device, and copy from it, at once, what verification and the drafter will read.

        Returns the scores that know it, the verdict if they alone do not tell it, and the drafter's answer; None where
        rows must be taken one by one.
        """
        sampler = self.sampler
        late = [draft.tokens] if type(draft.tokens) is device_copies.Later else []
        reads = self._reads_back or self._top_k > 1 or late
        if output.argmax is not None and not (reads or sampler.sample or sampler.processors):
            return None, None, None  # one copy does for all sequences of a batch
        if not sampler.takes_together:
            return None, None, None
        scores = output.scores(draft.scored_rows())
        device, depths = scores.logits.device, self._process(block, draft, scores)
        rule = verifier_for(sampler.params, draft, sampling=sampler.sample)
        read, judge = ([], None) if rule is match else look(rule, draft, scores, sampler)
        best, own = sampler.decide(scores, () if rule is reject else depths)
        wanted = [scores.top(self._top_k)] if self._top_k > 1 else []
        if wanted and sampler.sample:
            wanted.append(scores.logits.gather(1, wanted[0]).float())
        asked = self._readback(block, draft, scores, output, own) if rule is match else None
        tensors = [best, *([] if own is best else [own]), *read, *wanted, *(tokens.tensor for tokens in late)]
        found = iter(
            device_copies.copy_out([tensor.to(device) for tensor in (*tensors, *([] if asked is None else [asked]))])
        )
        most = next(found)
        decided = most if own is best else next(found)
        numbers = [next(found) for _ in read]
        scores.decided(most, () if rule is reject else decided, *(next(found) for _ in wanted))
        for tokens in late:
            tokens.known(next(found))
        return scores, None if judge is None else judge(numbers), next(found, None)

    def _process(self, block: Block, draft: Draft, scores: Scores) -> list[int]:
        """Have the processors judge the scored rows, without reading any; the rows' depths."""
        rows = range(len(draft)) if scores.rows is None else scores.rows
        depths = [draft.depths[row] for row in rows]
        if self.sampler.processors:
            device = scores.logits.device
            paths = unread = torch.empty(0, dtype=torch.long, device=device)
            if "paths" in block.sent:
                sent = block.sent["paths"]
                paths = block.tokens[0].index_select(0, sent.flatten()).view(sent.shape).to(device)
                unread = block.sent["unread"].to(device)
            scores.processed = self.sampler.together(
                scores.logits, paths, unread, depths, lambda place: draft.path_tokens(rows[place])
            )
        return depths

    def _readback(
        self, block: Block, draft: Draft, scores: Scores, output: TargetOutput, own: torch.Tensor
    ) -> torch.Tensor | None:
        """What the session asks of a step whose rows' ``own`` tokens are on the device."""
        if not (self._reads_back and isinstance(self._session, ReadbackSession)):
            return None
        device = own.device
        walked = (
            block.tokens[0],
            block.sent["parent_places"],
            block.sent["eligible"],
            block.seen(len(draft), device),
        )
        last = last_row(own, *(tensor.to(device) for tensor in walked))
        depth = walked[-1].to(device).index_select(0, last).sum(1) - 1
        place = torch.searchsorted(block.sent["rows"].to(device), last) if "rows" in block.sent else last
        return self._session.readback(DeviceStep(scores, output.taps, last, depth, own.index_select(0, place)))

    def result(self) -> Generation:
        """The generation as it stands."""
        new, predicted = self.tokens[self.stats.prompt_tokens :], self._context.prediction
        if predicted:
            self.stats.accepted_prediction_tokens = found = appeared(predicted, new)
            self.stats.rejected_prediction_tokens = len(predicted) - found
        text = "" if self._text is None else self._text.text
        logprobs = None if self._top is None else self._logprobs
        return Generation(text, new, self.finish_reason or "unfinished", self.stats, self.steps, logprobs)

    def chunks(self) -> Iterator[Chunk]:
        """Drive to the end, yielding each step; the model is as it was while the caller has the chunk."""
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
        """Raises DraftError where a session broke the rules that exactness stands on."""
        tokens, last, size = draft.tokens, self.tokens[-1], self._target.vocab_size
        if len(tokens) > row_budget:
            raise DraftError(
                f"draft has {len(tokens)} rows but {row_budget} slots are free; propose at most `row_budget` rows "
                f"(drafter {self._drafter.name!r}), lower its sizes, or raise the engine's max_rows"
            )
        if type(tokens) is device_copies.Later:
            return  # a model drew them from the vocabulary, and to check them here would wait for the device
        if tokens[0] != last:
            raise DraftError(
                f"the draft's root is token {tokens[0]}, the last emitted token is {last}; "
                f"row 0 must be context.root (drafter {self._drafter.name!r})"
            )
        if not 0 <= min(tokens) <= max(tokens) < size:
            raise DraftError(f"drafter {self._drafter.name!r} proposed a token outside the vocabulary [0, {size})")

    def _cut(self, tokens: Sequence[int]) -> int:
        """How many of the accepted tokens plain decoding would have emitted; sets the finish reason."""
        text = self._text
        watched = self._stop_when is not None or (text is not None and text.watches)
        if not watched and self._ends.isdisjoint(tokens) and len(self.tokens) + len(tokens) < self._end:
            if text is not None:
                text.extend(tokens)
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            stopped = (text is not None and text.push(token)) or token in self._stop_token_ids
            if token in self._eos_ids:
                self.finish_reason = "eos"
            elif stopped or (self._stop_when is not None and self._stop_when([*self.tokens, *tokens[:count]])):
                self.finish_reason = "stop"
            elif len(self.tokens) + count == self._end:
                self.finish_reason = self._end_reason
            if self.finish_reason is not None:
                return count
        return len(tokens)


def _paths(draft: Draft, rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """[R, D] of some rows those that lie between the root and each of them, itself last; filled up with the root."""
    found = np.zeros((len(rows), max(draft.depths)), dtype=np.int64)
    for own, row in zip(found, rows, strict=True):
        while row > 0:
            own[draft.depths[row] - 1], row = row, draft.parents[row]
    return found


def cache_sizes(engine: Setup, prompt_tokens: int, max_new_tokens: int) -> tuple[int, int]:
    """Most tokens of a text, prompt and all, and most rows of one of its forwards."""
    end = min(prompt_tokens + max_new_tokens, engine.target.context_length)
    return end, max(engine.max_rows, min(engine.chunk_rows, prompt_tokens))
