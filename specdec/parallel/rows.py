"""Rows: a step's tree is split over processes that each hold the whole model (lookahead parallelism, for any drafter).

Fu et al. 2024 (section 3.4, lookahead parallelism) split a window's columns and the n-grams beside it. Here the
subtrees of any draft are split (:mod:`specdec.parallel.split`). All ranks run the same engine and drafter on the same
text, so each rank knows the draft and runs its share. Then one collective of fixed size sends the numbers that verifier
and drafter read: the target's tokens along the rank's *way*, its accepted path through its share of the tree; each
row's likeliest tokens; and the hidden state at the end of the way.

A way holds the target's own tokens at any temperature, as the noise depends on the position only, and every rank that
holds a row draws the same token there. So the verdict is the longest way. Where rounding makes two ranks differ, the
first rank counts; a rank that keeps differing is broken.

Keys and values are not exchanged. Accepted rows of another rank are run again with the next step's share: they are few,
and use the same reading of the weights. Sending their keys and values, 2 x layers x heads x width numbers per token,
would need a second collective after the verdict: for a 7 B model in half precision half a megabyte per token, against
about a kilobyte for everything above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process

from specdec.errors import ConfigError, ParallelError
from specdec.parallel.ranks import checksum
from specdec.parallel.shares import SharedCache
from specdec.parallel.target import ParallelTarget
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import Verdict, Verifier, match
from specdec.step.cache import KVCache
from specdec.step.step_io import WHOLE, StepInput, Wanted
from specdec.step.step_output import StepOutput, Top
from specdec.step.tree import Draft
from specdec.target import FINAL, Target

__all__ = ["ShardedTarget"]

_STATEFUL = ("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")
_ALLOWED = 4  # steps in which a rank may differ by rounding, and one in eight besides


class ShardedTarget(ParallelTarget):
    """A target each step of which is split over ranks that all hold the model.

    A drafter's hidden states (``taps``) are given for the last accepted row, and are NaN elsewhere.

    Args:
        target: this process's.
        max_rows: most rows of a draft.
        options: as of ParallelTarget.
    """

    kind, splits = "rows", True

    def __init__(self, target: Target, *, max_rows: int = 128, **options: Any) -> None:
        super().__init__(target, **options)
        self.max_rows = max_rows
        self._steps, self._differed = 0, [0] * self.ranks.size

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        if not self.together:
            return self._target.new_cache(capacity=capacity, rows=rows)
        own = self._target.new_cache(capacity=capacity, rows=2 * rows)  # a share, and as many pending rows
        return SharedCache(own, self.ranks.rank, self.ranks.size, capacity=capacity, rows=rows)

    def greet(self, sampler: Sampler, **others: Any) -> None:
        if others["the_logprobs"] is not None:
            raise ConfigError("parallel='rows' exchanges tokens and no logits; leave out logprobs, or take 'tensor'")
        super().greet(sampler, **others)

    def forward(self, step: StepInput) -> StepOutput:
        cache, wanted = step.texts[0], step.wanted
        if len(step.texts) > 1 or not isinstance(cache, SharedCache):
            return self._target.forward(step)
        early = step.entering is not None or step.plan != WHOLE
        if early or {*wanted.hidden} - {FINAL}:
            raise ConfigError(
                "parallel='rows' splits whole forwards, and this drafter runs the target's first layers by itself; "
                "choose one that does not, such as lookahead, medusa or auto"
            )
        tokens: list[int] = step.ids.tolist()
        if wanted.nothing:  # of the prompt; every rank needs its keys
            return self._target.forward(StepInput.of(cache.own, tokens, wanted=wanted))
        parents: list[int] = step.parents.tolist()
        shares = cache.share(tokens, parents)
        share, pending = shares[self.ranks.rank], cache.pending
        place = {-1: len(pending) - 1} | {row: len(pending) + at for at, row in enumerate(share)}
        above = [*range(-1, len(pending) - 1), *(place[parents[row]] for row in share)]
        own = Draft([*pending, *(tokens[row] for row in share)], above)
        scored = wanted.scored or [*range(len(tokens))]
        held = np.array([place[row] for row in scored if row in place], dtype=np.int64)
        output = self._target.forward(
            StepInput.of(cache.own, own.tokens, own.tree, wanted=Wanted(held, wanted.top_k, wanted.hidden))
        )
        output.hidden = {layer: found[len(pending) :] for layer, found in output.hidden.items()}
        output.rows = [at for at, row in enumerate(share) if row in scored]
        output.join = partial(self._judge, cache, shares, wanted)
        return output

    def _judge(
        self,
        cache: SharedCache,
        shares: list[list[int]],
        wanted: Wanted,
        rule: Verifier,
        draft: Draft,
        output: StepOutput,
        sampler: Sampler,
    ) -> Verdict:
        """Verify a draft together with all ranks; afterwards ``output`` is that of the whole draft."""
        self._refuse(rule, draft, sampler)
        ranks, top_k, share = self.ranks, min(wanted.top_k, self.vocab_size), shares[self.ranks.rank]
        cache.text = checksum(sampler.tokens[cache.known :], start=cache.text)
        cache.known = len(sampler.tokens)
        message = _Message(self.max_rows, top_k, {layer: t[0] for layer, t in output.hidden.items()})
        failure = None
        try:
            words = message.written(output, draft, sampler, share)
        except Exception as error:  # the others must not wait for this rank
            failure, words = error, message.failed()
        message.read(words)["text"] = checksum(
            draft.tokens, draft.parents, sorted(draft.probes), draft.read, start=cache.text
        )
        found = message.read(ranks.gather(torch.from_numpy(words)).numpy())
        if failure is not None:
            raise failure
        ranks.check_equal("the draft", found["text"][:, 0].tolist())
        for rank in np.flatnonzero(found["count"] < 0).tolist():
            raise ParallelError(f"rank {rank} failed in the middle of a step; its own error says why")
        ways = [message.way(parts, draft, share) for parts, share in zip(found, shares, strict=True)]
        self._compare([way[0] for way in ways])
        verdict = _settled(draft, ways)
        ends = [parts for parts, way in zip(found, ways, strict=True) if [*way][-1] == verdict.path[-1]]
        whole = {layer: own.new_full((len(draft), own.shape[-1]), torch.nan) for layer, own in output.hidden.items()}
        for parts in ends[:1]:
            for layer, rows in whole.items():
                rows[verdict.path[-1]] = message.tap(parts, layer)
        output.rows = wanted.scored
        best = message.best(found, shares, range(len(draft)) if output.rows is None else output.rows)
        output.gather(Top(top_k, best, ()), whole)
        return verdict

    def _refuse(self, rule: Verifier, draft: Draft, sampler: Sampler) -> None:
        """Raises ConfigError for what needs more than a row's token."""
        if rule is not match:
            what = "a draft with probabilities (q)" if draft.q else f"acceptance={sampler.params.acceptance!r}"
            raise ConfigError(
                f"parallel='rows' exchanges tokens, and {what} is judged by whole distributions; "
                "use acceptance='match' or another drafter"
            )
        for processor in sampler.processors:
            name = type(processor).__name__
            if getattr(logits_process, name, None) is not type(processor) or name in _STATEFUL:
                raise ConfigError(
                    f"logits processor {name} may keep a state, which would be another one on every rank; "
                    "parallel='rows' takes those of transformers that keep none"
                )
        if len(draft) > self.max_rows:
            raise ConfigError(f"a draft has {len(draft)} rows, and ranks send {self.max_rows}; raise max_rows of both")

    def _compare(self, tokens: Sequence[int]) -> None:
        """Raises ParallelError if a rank's token after the root differs from rank 0's by more than rounding."""
        self._steps += 1
        for rank, token in enumerate(tokens):
            self._differed[rank] += token != tokens[0]
            if self._differed[rank] > _ALLOWED + self._steps // 8:
                raise ParallelError(
                    f"rank {rank} continued the same text otherwise than rank 0 in {self._differed[rank]} of "
                    f"{self._steps} steps, which is no rounding; check that both have the same weights, and its device"
                )


Way = dict[int, int]
"""Rows that a rank went through, in order, and the target's token after each."""


Words = np.ndarray[Any, Any]


class _Message:
    """The message of a rank about its share; it has the same size in every step of a text.

    ``text``: checksum of text and draft. ``count``, ``way``: the tokens of its way, -1 if it failed. ``best``: the
    likeliest tokens of each scored row of its share. The rest: the taps at the end of its way.
    """

    def __init__(self, max_rows: int, top_k: int, taps: Mapping[int, torch.Tensor]) -> None:
        self._top_k, self._like = top_k, taps
        numbers = [("text", 1), ("count", 1), ("way", max_rows), ("best", max_rows * top_k)]
        numbers += [(str(layer), tap.nbytes // 4) for layer, tap in taps.items()]
        self._parts = np.dtype([(name, np.int32, (size,)) for name, size in numbers])

    def read(self, words: Words) -> Words:
        """The parts, by name, of [..., words] int32."""
        return words.view(self._parts)[..., 0]

    def failed(self) -> Words:
        """[words] int32 of a rank that failed."""
        words = np.zeros(self._parts.itemsize // 4, dtype=np.int32)
        self.read(words)["count"] = -1
        return words

    def written(self, output: StepOutput, draft: Draft, sampler: Sampler, share: Sequence[int]) -> Words:
        words = self.failed()
        place = {row: at for at, row in enumerate(share)}
        own = Draft(
            [draft.tokens[row] for row in share],
            [-1, *(place[draft.parents[row]] for row in share[1:])],
            probes=frozenset(place[row] for row in draft.probes if row in place),
        )
        verdict, parts = match(own, output, sampler), self.read(words)
        parts["count"], parts["way"][: len(verdict.tokens)] = len(verdict.tokens), verdict.tokens
        if self._top_k:
            best = np.ravel(output.top_k(self._top_k))
            parts["best"][: len(best)] = best
        for layer, tap in output.hidden.items():
            parts[str(layer)] = tap[verdict.path[-1]].cpu().view(torch.int32).numpy()
        return words

    def way(self, parts: Words, draft: Draft, share: Sequence[int]) -> Way:
        """The rows of a rank's way, found by its tokens."""
        row, way = 0, Way()
        for token in parts["way"][: int(parts["count"][0])].tolist():
            way[row] = token
            row = next((r for r in share if draft.parents[r] == row and draft.tokens[r] == token
                        and r not in draft.probes), -1)  # fmt: skip
        return way

    def best(self, found: Words, shares: Sequence[Sequence[int]], scored: Sequence[int]) -> list[int]:
        """The likeliest tokens of each scored row, by the first rank that has the row, one row after the other."""
        known: dict[int, list[int]] = {}
        wanted, count = set(scored), self._top_k
        for parts, share in zip(found, shares, strict=True):
            rows = [row for row in share if row in wanted]
            table = parts["best"][: len(rows) * count].reshape(len(rows), count).tolist()
            known = dict(zip(rows, table, strict=True)) | known
        return [token for row in scored for token in known[row]]

    def tap(self, parts: Words, layer: int) -> torch.Tensor:
        """[D] of a layer at the end of a rank's way."""
        like = self._like[layer]
        return torch.from_numpy(parts[str(layer)].copy()).view(like.dtype).to(like.device)


def _settled(draft: Draft, ways: Sequence[Way]) -> Verdict:
    """The way through the whole draft; at each row by the first rank that went through it."""
    path, tokens = [0], list[int]()
    while True:
        tokens.append(next(way[path[-1]] for way in ways if path[-1] in way))
        child = draft.child(path[-1], tokens[-1])
        if child is None or not any(child in way for way in ways):
            return Verdict(path, tokens)
        path.append(child)
