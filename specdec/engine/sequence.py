"""A sequence: one generation under way, and the parts of a step that are its own.

Between steps ``cache.length == len(tokens) - 1``: the last token is the root of the next draft, and its keys and values
are computed with it. Prefill is a step whose rows are all known, so the first step of a text is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from specdec.costs.prices import UNBATCHED, BatchLoad, Rest
from specdec.drafter import BatchedSession, Drafter, Observation, ReadbackSession, RestingSession
from specdec.drafting.sessions import check_rows, propose_at_once, proposing, session_of, top_k_of
from specdec.engine.ending import Ending
from specdec.engine.prefix_cache import KeptText, PrefixCache
from specdec.engine.requests import Request
from specdec.engine.setup import Pricing, Setup, cache_sizes, context_of
from specdec.engine.verification import may_accept, verifying
from specdec.results import TokenLogprobs
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import Judge, Verdict, match, verifier_for, verify
from specdec.step.forward_passes import Passes, waiting_for
from specdec.step.step_io import NOTHING, StepInput, Walk, Wanted
from specdec.step.step_output import StepOutput
from specdec.step.tree import Draft

__all__ = ["ScheduledRows", "SequenceState"]


@dataclass(slots=True, eq=False)
class ScheduledRows:
    """The rows that one sequence has in a forward of the target: a draft, or a chunk of its prompt.

    Attributes:
        sequence: the sequence.
        step: the rows.
        draft: as proposed; None for a chunk of the prompt.
        asked: whether the drafting session proposed the draft. A plain step while drafting rests is shown to the
            session as a chunk of the prompt is.
        reads: whether verification reads the rows from a device.
        judge, numbers: the verification that waits for numbers of the device, and these, once they are copied.
        accepted: the path that verification found, before the text's end cut it.
    """

    sequence: SequenceState
    step: StepInput
    draft: Draft | None = None
    asked: bool = False
    reads: bool = False
    judge: Judge | None = None
    numbers: list[list[Any]] | None = None
    accepted: Sequence[int] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the rows are a draft that goes through all layers and gets logits for every row."""
        step = self.step
        return self.draft is not None and step.entering is None and step.wanted.logits is None


class SequenceState:
    """One text under way, of a request that ``Engine.prepare`` gave.

    :func:`specdec.engine.step.step` calls ``propose``, ``look_again``, ``chunk``, ``read``, ``verify``, ``commit`` and
    ``observe``. A :class:`specdec.engine.decoding.Decoding` has it, and holds ``target.active()`` around them.

    Args:
        engine: target, tokenizer and sizes.
        request: a prepared request.
        drafter: whose session drafts.
        pricing: the costs of rows that the session gets.

    Attributes:
        context: text, cache, sampling and bounds, as the drafting session sees them. The sampler reads the same text.
        drafter, session, ending: of the sequence; the last makes its text and decides where it ends.
        draws: whether its tokens are sampled.
        prefilling: whether tokens of the prompt before the last one have still to be run.
        reused: tokens of the prompt that came from a prefix cache.
        scheduled: a draft that has not been run yet because a forward had no room for it.
        logprobs: log-probabilities of the tokens so far; empty if they were not asked for.
    """

    def __init__(self, engine: Setup, request: Request, drafter: Drafter, pricing: Pricing) -> None:
        target, tokens, sampling = engine.target, [*cast(list[int], request.prompt)], request.sampling
        assert sampling is not None
        target.check_unchanged()
        self._target, self.drafter = target, drafter
        self._sampler = Sampler(
            sampling, tokens, target.vocab_size, target.head_device, request.logits_processor, request.sample
        )
        self.draws, self._drawing = self._sampler.sample, self._sampler.draws
        self._tells, self._top_k = bool(drafter.taps) or drafter.needs_observe, top_k_of(drafter)
        self._plain_top_k = self._top_k if target.shared else 0  # processes send as much in every step
        capacity, rows = cache_sizes(engine, len(tokens), request.max_new_tokens)
        self.ending, self._chunk = Ending(engine.tokenizer, request, tokens, capacity), engine.chunk_rows
        cache = target.new_cache(capacity=capacity, rows=rows)
        cache.grow(len(tokens))
        self.context = context_of(engine, request, pricing, self._sampler, cache, capacity)
        self.session = session_of(drafter, self.context)
        self._asks = drafter.proposes or self._tells
        self._batched = isinstance(self.session, BatchedSession)
        # What several processes judge together, each judges on the host.
        self._apart = target.launches and not target.shared
        self._reads = self._apart and self._sampler.takes_together
        self._by_argmax = self._sampler.greedy and sampling.acceptance != "typical"
        self._reader = self.session if self._apart and isinstance(self.session, ReadbackSession) else None
        self._forgoes = isinstance(self.session, RestingSession)
        self._root = Draft.root(0)  # of all plain steps, each of which has its token
        self._missed = False  # whether there is text since the latest draft whose hidden states are not known
        self.scheduled: ScheduledRows | None = None
        self._top, self.logprobs = request.logprobs, list[TokenLogprobs]()
        self._prefix_cache, self.reused = request.prefix_cache, 0
        self._kept = None if request.prefix_cache is None else self._take(request.prefix_cache)
        self.prefilling = cache.length < len(tokens) - 1
        if target.shared:
            target.greet(self._sampler, **self._told(engine.tokenizer, request))

    def _told(self, tokenizer: Any, request: Request) -> dict[str, Any]:
        """What decides the text besides model, prompt and sampling: all ranks that run it compare this."""
        drafter, ending = self.drafter, self.ending
        spelled = None if tokenizer is None else (type(tokenizer).__qualname__, getattr(tokenizer, "vocab_size", None))
        return {
            "the_stops": (set(request.stop), spelled, request.stop_when),
            "the_stop_tokens": (ending.stop_token_ids, ending.eos_ids),
            "the_length": ending.most,
            "the_rows": (self._chunk, self.context.max_rows),
            "the_drafter": (drafter.name, drafter.taps, drafter.needs_observe, self._top_k),
            "the_prediction": self.context.prediction,
            "the_logprobs": request.logprobs,
        }

    def look_again(self) -> None:
        """Look into the prefix cache again if nothing of the prompt has run: others may have run its beginning."""
        if self._prefix_cache is not None and not self.context.cache.length:
            self._kept = self._take(self._prefix_cache)
            self.prefilling = self.context.cache.length < self.context.prompt_length - 1

    def _take(self, prefix_cache: PrefixCache) -> KeptText:
        """Copy the prompt's known beginning from the prefix cache; the session observes it as if it had just run.

        Where the text depends on drafts, they are those of a text that runs whole: all hidden states must be known.
        """
        context, layers = self.context, self.drafter.taps
        with self._target.active():
            text, taps = prefix_cache.begin(
                self._target, context.cache, self.tokens, layers, forgoes=self._forgoes and not context.isolated
            )
            self.reused = context.cache.length
            known = min(map(len, taps.values()), default=0)
            self._missed = bool(layers) and known < self.reused
            for start in range(0, known, self._chunk):
                part = slice(start, min(start + self._chunk, known))
                chunk, seen = self.tokens[part], {layer: hidden[part] for layer, hidden in taps.items()}
                self.session.observe(Observation(None, range(len(chunk)), chunk, taps=seen))
        return text

    @property
    def tokens(self) -> list[int]:
        """Prompt and text. Read only."""
        return self.context.tokens

    @property
    def finish_reason(self) -> str | None:
        """Why the text ended; None while it goes on."""
        return self.ending.reason

    @property
    def drafts(self) -> bool:
        """Whether it drafts in the next step; otherwise its prompt is run, or its draft waits for room."""
        return self.scheduled is None and not self.prefilling

    def chunk(self, most: int, resting: Rest) -> ScheduledRows:
        """The next tokens of the prompt, at most ``most``."""
        cache = self.context.cache
        start, size = cache.length, min(self._chunk, most)
        known = self.tokens[start : min(start + size, self.context.prompt_length - 1)]
        wanted = Wanted(NOTHING.logits, 0, self._taps(resting))
        return ScheduledRows(self, StepInput.of(cache, known, wanted=wanted, again=False))

    def _taps(self, resting: Rest) -> Collection[int]:
        """The hidden layers to ask for; none where drafting rests for long and the session can do without."""
        return frozenset() if resting is Rest.LONG and self._forgoes else self.drafter.taps

    def _tell_missed(self) -> None:
        """Tell the session, if it is so, that text ran whose hidden states are not known."""
        if self._missed and isinstance(self.session, RestingSession):
            self._missed = False
            self.session.missed()

    def propose(self, load: BatchLoad, resting: Rest) -> ScheduledRows | Passes[ScheduledRows]:
        """The next draft, or the passes that its session waits for; ``resting``: the root alone."""
        context = self.context
        row_budget = self._row_budget(UNBATCHED if context.isolated else load, resting)
        if row_budget == 1 and context.policy is not None and not self.drafter.plans_rows and context.policy.rests:
            resting = Rest.LONG
        if resting or context.remaining <= 1 or not self._asks:
            self._root.tokens = [context.tokens[-1]]
            return self._scheduled(self._root, self._taps(resting), self._plain_top_k)
        self._tell_missed()
        if self._batched:
            return self._drafting(row_budget)
        draft = propose_at_once(self.session, row_budget, self.drafter.name, self._target)
        check_rows(draft, row_budget, self.tokens[-1], self.drafter.name, self._target)
        return self._scheduled(draft, self.drafter.taps, self._top_k, asked=True)

    def _drafting(self, row_budget: int) -> Passes[ScheduledRows]:
        """The next draft of a session that waits for passes."""
        passes = proposing(self.session, row_budget, self.drafter.name, self._target)
        draft = yield from waiting_for(passes, together=not self.context.isolated)
        check_rows(draft, row_budget, self.tokens[-1], self.drafter.name, self._target)
        return self._scheduled(draft, self.drafter.taps, self._top_k, asked=True)

    def _scheduled(self, draft: Draft, taps: Collection[int], top_k: int, *, asked: bool = False) -> ScheduledRows:
        """A draft as rows of a forward; ``asked``: of the session."""
        context, sampler = self.context, self._sampler
        if draft.on_device is not None and (sampler.reads_drafts or not self._apart):
            draft.on_host()
        scored, draws, walks = draft.scored_rows() if draft.probes else None, None, tuple[Walk, ...]()
        if self.draws and verifier_for(context.sampling, draft, sampling=True) is match:
            draws = self._drawing
        if self._apart:
            accepted = may_accept(draft, sampler, walks=asked and self._reader is not None)
            walks = (Walk(*accepted, sampler.unread if self._reads else None),)
        logits = None if scored is None else np.array(scored, dtype=np.int64)
        wanted = Wanted(logits, top_k, taps, draws, walks)
        tokens = draft.tokens if draft.on_device is None else draft.on_device
        tree = None if draft.is_chain else draft.tree
        step = StepInput.of(context.cache, tokens, tree, wanted=wanted, entering=draft.entry)
        return ScheduledRows(self, step, draft, asked, self._reads)

    def _row_budget(self, load: BatchLoad, resting: Rest) -> int:
        """Rows that the next draft may have."""
        context, policy = self.context, self.context.policy
        row_budget = min(context.max_rows, context.cache.free)
        context.remaining = self.ending.most - len(context.tokens)
        if policy is not None:
            policy.prices.batch_load = load
            if not (resting or self.drafter.plans_rows):
                row_budget = policy.row_budget(row_budget, context.cache.length)
        return row_budget

    def read(self, rows: ScheduledRows, output: StepOutput) -> list[torch.Tensor]:
        """Begin to verify a draft on a device; returns the tensors whose numbers ``verify`` reads besides argmax."""
        draft, reader = rows.draft, self._reader if rows.asked else None
        assert draft is not None
        if self._by_argmax and reader is None and draft.on_device is None:
            return []
        tensors, rows.judge = verifying(draft, rows.step, output, self._sampler, reader)
        return tensors

    def verify(self, rows: ScheduledRows, output: StepOutput) -> Verdict:
        """The accepted rows and the emitted tokens, cut where the text ends; for a chunk all of its rows."""
        if rows.draft is None:
            return Verdict(range(rows.step.rows), rows.step.ids.tolist())
        if rows.reads and rows.numbers is None:
            rows.numbers = output.fetch(*self.read(rows, output), top_k=rows.step.wanted.top_k)
        verdict = verify(rows.draft, output, self._sampler) if rows.judge is None else rows.judge(rows.numbers or [])
        rows.accepted, tokens, ending = verdict.path, verdict.tokens, self.ending
        left = ending.most - len(self.context.tokens)
        if ending.watches or len(tokens) >= left or not ending.ends.isdisjoint(tokens):
            verdict.cut(ending.cut(tokens))
        if self._top is not None:
            self.logprobs += output.logprobs(verdict.path, verdict.tokens, self._top)
        return verdict

    def commit(self, rows: ScheduledRows, verdict: Verdict, output: StepOutput) -> None:
        """Append the accepted rows to the cache and the emitted tokens to the text."""
        context = self.context
        if rows.step.wanted.hidden:
            self._tell_missed()
        context.cache.commit(verdict.path)
        if rows.draft is not None:
            context.tokens += verdict.tokens
        elif context.cache.length == context.prompt_length - 1:
            self.prefilling = False
        if self._kept is not None:
            self._kept.keep(output.hidden, verdict.path)

    def observe(self, rows: ScheduledRows, verdict: Verdict, output: StepOutput) -> None:
        """Show the drafting session what became of its draft."""
        if self.finish_reason is not None:
            if self._kept is not None and self._prefix_cache is not None:
                self._prefix_cache.keep(self._kept)
            return
        if not rows.asked:
            if rows.step.wanted.hidden:
                ids = rows.step.ids.tolist()
                self.session.observe(Observation(None, verdict.path, ids, taps=output.hidden))
            elif self.drafter.taps:
                self._missed = True
        elif self._tells:
            path, tokens = verdict.path, verdict.tokens
            self.session.observe(Observation(rows.draft, path, tokens, output, output.hidden, verdict.readback))
