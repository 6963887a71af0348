"""Decoding: one generation under way, one turn after the other.

A turn is what a sequence brings to a forward: a chunk of its prompt, or a draft. It is made, the target runs it, by
itself or together with other sequences' turns, and what comes back is verified and committed. Between turns that are
drafts ``cache.length == len(tokens) - 1``: the last token is the root of the next draft, and its keys and values are
computed with it. Prefill is a step whose rows are all known, so the first step is an ordinary one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specdec import copies
from specdec.block import Block
from specdec.cost import CostCurve, Crowd
from specdec.draft import Draft
from specdec.drafter import AskingSession, Context, Drafter, Observation, Question, proposing, session_of
from specdec.errors import DraftError
from specdec.parallel.target import ParallelTarget
from specdec.passes import Part, Passes, alone, timed
from specdec.policy import RowPolicy
from specdec.prefix import KeptText, PrefixCache
from specdec.results import Chunk, Generation, Statistics, Step, TokenLogprobs
from specdec.sampling import Sampler, SamplingParams, Scores
from specdec.target import Target, TargetOutput
from specdec.text import TextStream
from specdec.verify import last_row, match, verifier_for, walk_arrays

__all__ = ["Decoding", "Setup", "Turn", "cache_sizes"]


class Setup(Protocol):
    """What a decoding needs of an engine, see :class:`specdec.engine.Engine`."""

    target: Target
    tokenizer: Any
    drafter: Drafter
    max_rows: int
    costs: CostCurve

    @property
    def chunk_rows(self) -> int:
        """Most tokens of a prompt that go through one forward."""

    def row_policy(self) -> RowPolicy | None:
        """What decides on the rows of a new sequence, if anything does."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Turn(Part):
    """What one sequence brings to a forward of the target.

    Attributes:
        draft: as proposed; None for a chunk of the prompt.
        drafting: seconds that it took to propose.
        made: when it was there, on the clock of ``perf_counter``.
    """

    draft: Draft | None
    drafting: float
    made: float


class Decoding:
    """One generation under way. Made by ``Engine.start``; the caller holds ``target.active()`` around its methods.

    ``prefill`` and ``step`` drive it by itself. To drive several together, take each one's ``chunk`` or ``propose``,
    run the turns in one forward, and hand each its part of the output in ``absorb`` or ``conclude``.
    """

    def __init__(
        self,
        engine: Setup,
        prompt: list[int],
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        processors: Sequence[Any],
        stop_when: Callable[[Sequence[int]], bool] | None,
        sample: bool | None,
        eos_ids: frozenset[int],
        text: TextStream | None,
        logprobs: int | None,
        prefix_cache: PrefixCache | None,
    ) -> None:
        target = engine.target
        target.check_unchanged()
        self._target, self._tokenizer, self._drafter = target, engine.tokenizer, engine.drafter
        self._policy = engine.row_policy()
        self._crowd: Crowd | None = None
        self._tells = bool(engine.drafter.taps) or engine.drafter.needs_observe
        self._likeliest = engine.drafter.likeliest if engine.drafter.needs_observe else 0
        self._stop_when, self._eos_ids, self._text = stop_when, eos_ids, text
        self.tokens = list(prompt)
        self._end, rows = cache_sizes(engine, len(prompt), max_new_tokens)
        self._end_reason = "length" if self._end == len(prompt) + max_new_tokens else "context"
        self._chunk = engine.chunk_rows
        self._cache = target.new_cache(capacity=self._end, rows=rows)
        self._cache.reserve(len(prompt))
        self.sampler = Sampler(sampling, self.tokens, target.vocab_size, target.head_device, processors, sample)
        self._context = Context(
            target=target,
            cache=self._cache,
            tokens=self.tokens,
            prompt_length=len(prompt),
            remaining=self._end - len(prompt),
            max_rows=engine.max_rows,
            sampling=sampling,
            noise=self.sampler.noise,
            rng=random.Random(sampling.seed),
            costs=engine.costs,
            policy=self._policy,
        )
        self._session = session_of(self._drafter, self._context)
        # Where the text at a seed depends on the rows that are proposed, as under ``reject``, it must not depend on
        # other sequences, and so the rows must not either.
        rejects = sampling.acceptance == "reject" or (sampling.acceptance == "auto" and self._drafter.draws)
        self._by_rows = sampling.acceptance == "typical" or (self.sampler.sample and rejects)
        # Of several processes none decides by itself what its rows say.
        apart = copies.is_apart(target.device) and copies.is_apart(target.head_device)
        self._apart = apart and not isinstance(target, ParallelTarget)
        self._asks = self._apart and isinstance(self._session, AskingSession)
        self.finish_reason: str | None = None
        self.stats = Statistics(prompt_tokens=len(prompt), lossy=sampling.lossy)
        self.steps: list[Step] = []
        self._top = logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._kept = None if prefix_cache is None else self._take(prefix_cache)

    def _take(self, prefix_cache: PrefixCache) -> KeptText:
        """Have what is known of the prompt's beginning; the session is shown it as if it had just been run."""
        began = perf_counter()
        with self._target.active():
            text, taps = prefix_cache.begin(self._target, self._cache, self.tokens, self._drafter.taps)
            self.stats.reused_tokens = known = self._cache.length
            for start in range(0, known if taps else 0, self._chunk):
                part = slice(start, min(start + self._chunk, known))
                chunk, seen = self.tokens[part], {layer: hidden[part] for layer, hidden in taps.items()}
                self._session.observe(Observation(None, range(len(chunk)), chunk, taps=seen))
        self.stats.seconds.prefill += perf_counter() - began
        return text

    @property
    def cache_bytes(self) -> int:
        """Bytes of the target's cache."""
        return self._cache.nbytes

    @property
    def prefilling(self) -> bool:
        """Whether the prompt, but its last token, has still to be run."""
        return self._cache.length < self.stats.prompt_tokens - 1

    def share(self, crowd: Crowd | None) -> None:
        """Say which others share the next forward; None if there are none."""
        self._crowd = None if self._by_rows else crowd

    def prefill(self) -> None:
        """Run the prompt but its last token, in chunks, with no logits."""
        while self.prefilling:
            turn = self.chunk()
            output = self._run(turn)
            self.absorb(turn, output, perf_counter() - turn.made)
        began = perf_counter()
        copies.wait(self._target.head_device)
        self.stats.seconds.prefill += perf_counter() - began

    def step(self) -> Step:
        """One draft, one target forward, at least one token."""
        turn = self.propose()
        output = self._run(turn)
        return self.conclude(turn, output, perf_counter() - turn.made)

    def _run(self, turn: Turn) -> TargetOutput:
        return self._target.forward(turn.block, entry=turn.entry, taps=self._drafter.taps, rows=turn.rows)

    def chunk(self, most: int | None = None) -> Turn:
        """The next tokens of the prompt, at most so many."""
        made, start = perf_counter(), self._cache.length
        size = self._chunk if most is None else min(self._chunk, most)
        known = self.tokens[start : min(start + size, self.stats.prompt_tokens - 1)]
        block = Block(self._cache, known, device=self._target.device, backend=self._target.backend, again=False)
        return Turn(block, (), draft=None, drafting=0.0, made=made)

    def absorb(self, turn: Turn, output: TargetOutput, seconds: float) -> None:
        """Commit a chunk of the prompt that was run, in so many seconds."""
        began, start, rows = perf_counter(), self._cache.length, range(turn.block.rows)
        self._cache.commit(rows)
        if self._kept is not None:
            self._kept.keep(output.taps, rows)
        if self._drafter.taps:
            self._session.observe(Observation(None, rows, self.tokens[start : start + len(rows)], taps=output.taps))
        self.stats.seconds.prefill += seconds + perf_counter() - began

    def propose(self) -> Turn:
        """The next draft, made by itself."""
        return alone(self.drafting())

    def drafting(self) -> Passes[Turn]:
        """The next draft, in the making: the passes that the session waits for, to be run beside others'."""
        draft, seconds, passes = yield from timed(self._drafted(), together=not self._by_rows)
        made = perf_counter()
        self.stats.seconds.passes += passes
        rows = draft.scored_rows()
        sent = self._arrays(draft, rows) if self._apart else None
        block = Block.of(draft, self._cache, self._target.device, self._target.backend, sent)
        return Turn(block, rows, draft.entry, draft=draft, drafting=seconds, made=made)

    def _drafted(self) -> Passes[Draft]:
        """What the session proposes, checked."""
        room = min(self._context.max_rows, self._cache.free)
        self._context.remaining = remaining = self._end - len(self.tokens)
        if self._policy is not None:
            self._policy.prices.crowd = self._crowd
            if not self._drafter.plans_rows:
                room = self._policy.room(room, self._cache.length)
        if remaining > 1:
            draft = yield from proposing(self._session, room, self._drafter.name, self._target)
        else:
            draft = Draft.chain(self.tokens[-1:])
        self._check(draft, room)
        return draft

    def _arrays(self, draft: Draft, rows: Sequence[int] | None) -> dict[str, npt.NDArray[Any]]:
        """What a step on a device needs there beside its rows; it goes in the same copy."""
        arrays = walk_arrays(draft, Scores(torch.empty(0), rows).place) if self._asks else {}
        if rows is not None:
            arrays["rows"] = np.array(rows, dtype=np.int64)
        unread = self.sampler.unread
        if unread is not None and self.sampler.takes_together:
            arrays["unread"] = np.array(unread, dtype=np.int64)
            arrays["paths"] = _paths(draft, range(len(draft)) if rows is None else rows)
        return arrays

    def conclude(self, turn: Turn, output: TargetOutput, seconds: float) -> Step:
        """Verify a draft that was run, in so many seconds, and commit what of it is the text."""
        draft, began, length = turn.draft, perf_counter(), self._cache.length
        assert draft is not None
        known, answer = self._copy_out(turn.block, draft, output) if self._apart else (None, None)
        verdict, scores = self._target.verify(output, draft, self.sampler, self._likeliest, known)
        verdict = verdict.cut(self._cut(verdict.tokens))
        if self._top is not None:
            self._logprobs += scores.logprobs(verdict.path, verdict.tokens, self._top)
        verified = perf_counter()

        self._cache.commit(verdict.path)
        self.tokens.extend(verdict.tokens)
        if self._kept is not None:
            self._kept.keep(output.taps, verdict.path)
        committed = perf_counter()
        if self._tells and self.finish_reason is None:
            self._session.observe(Observation(draft, verdict.path, verdict.tokens, scores, output.taps, answer))
        step = Step(len(self.steps), verdict.tokens, len(draft), self._drafter.name)
        self.steps.append(step)
        self.stats.acceptance_lengths.append(len(verdict.tokens))
        self.stats.rows.append(len(draft))
        observed = perf_counter()
        spent, drafting = self.stats.seconds, turn.drafting + observed - committed
        spent.draft += drafting
        spent.target += seconds
        spent.verify += verified - began
        spent.other += committed - verified
        if self._policy is not None:
            self._policy.prices.crowd = self._crowd
            self._policy.learn(draft, verdict.path, length, drafting, turn.drafting + seconds + observed - began)
        return step

    def _copy_out(self, block: Block, draft: Draft, output: TargetOutput) -> tuple[Scores | None, list[int] | None]:
        """Decide all rows on the device, and copy from it, at once, what verification and the drafter will read.

        Returns the scores that know it, and the drafter's answer; None where rows must be taken one by one.
        """
        sampler = self.sampler
        late = [draft.tokens] if isinstance(draft.tokens, copies.Later) else []
        reads = self._asks or self._likeliest > 1 or late
        if output.peaks is not None and not (reads or sampler.sample or sampler.processors):
            return None, None  # one copy does for all sequences of a batch
        if not sampler.takes_together:
            return None, None
        scores = output.scores(draft.scored_rows())
        device = scores.logits.device
        if sampler.processors:
            paths = unread = torch.empty(0, dtype=torch.long, device=device)
            if "paths" in block.sent:
                sent = block.sent["paths"]
                paths = block.tokens[0].index_select(0, sent.flatten()).view(sent.shape).to(device)
                unread = block.sent["unread"].to(device)
            scores.processed = sampler.together(scores.logits, paths, unread)
        if verifier_for(sampler.params, draft, sampling=sampler.sample) is not match:
            return scores, None
        depths = [draft.depths[row] for row in (range(len(draft)) if scores.rows is None else scores.rows)]
        decided = best, own = sampler.decide(scores, depths)
        wanted = [scores.top(self._likeliest)] if self._likeliest > 1 else []
        if wanted and sampler.sample:
            wanted.append(scores.logits.gather(1, wanted[0]).float().view(torch.int32))
        asked: torch.Tensor | None = None
        if self._asks and isinstance(self._session, AskingSession):
            rows = (
                block.tokens[0],
                block.sent["parent_places"],
                block.sent["eligible"],
                block.seen(len(draft), device),
            )
            last = last_row(own, *(tensor.to(device) for tensor in rows))
            depth = rows[-1].to(device).index_select(0, last).sum(1) - 1
            asked = self._session.ask(Question(scores, output.taps, last, depth))
        greedy = best is own
        answer = [] if asked is None else [asked.to(device)]
        drafted = [tokens.tensor.to(device) for tokens in late]
        found = copies.copy_out([*decided[greedy:], *wanted, *drafted, *answer])
        scores.decided(found[0], found[0 if greedy else 1], *found[2 - greedy : 2 - greedy + len(wanted)])
        for tokens in late:
            tokens.known(found[-1 - len(answer)])
        return scores, found[-1] if answer else None

    def result(self) -> Generation:
        """The generation as it stands."""
        new = self.tokens[self.stats.prompt_tokens :]
        if self._text is not None:
            self._text.finish()
            text = self._text.text
        else:
            text = "" if self._tokenizer is None else self._tokenizer.decode(new, skip_special_tokens=True)
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

    def _check(self, draft: Draft, room: int) -> None:
        """Raises DraftError where a session broke the rules that exactness stands on."""
        late = isinstance(
            draft.tokens, copies.Later
        )  # of the vocabulary, as a model drew them; nobody waits for them here
        if not late and draft.tokens[0] != self.tokens[-1]:
            raise DraftError(
                f"the draft's root is token {draft.tokens[0]}, the last emitted token is {self.tokens[-1]}; "
                f"row 0 must be context.root (drafter {self._drafter.name!r})"
            )
        if len(draft) > room:
            raise DraftError(
                f"draft has {len(draft)} rows but {room} slots are free; propose at most `room` rows "
                f"(drafter {self._drafter.name!r}), lower its sizes, or raise the engine's max_rows"
            )
        if not late and not 0 <= min(draft.tokens) <= max(draft.tokens) < self._target.vocab_size:
            raise DraftError(
                f"drafter {self._drafter.name!r} proposed a token outside the vocabulary [0, {self._target.vocab_size})"
            )

    def _cut(self, tokens: Sequence[int]) -> int:
        """How many of the accepted tokens plain decoding would have emitted; sets the finish reason."""
        for count, token in enumerate(tokens, 1):
            stopped = self._text is not None and self._text.push(token)
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
    """[R, D] of some rows those that lie between the root and each of them, itself among them; filled with the root."""
    found = np.zeros((len(rows), max(draft.depths)), dtype=np.int64)
    for own, row in zip(found, rows, strict=True):
        while row > 0:
            own[draft.depths[row] - 1], row = row, draft.parents[row]
    return found


def cache_sizes(engine: Setup, prompt_tokens: int, max_new_tokens: int) -> tuple[int, int]:
    """Most tokens of a text, prompt and all, and most rows of one of its forwards."""
    end = min(prompt_tokens + max_new_tokens, engine.target.context_length)
    return end, max(engine.max_rows, min(engine.chunk_rows, prompt_tokens))
