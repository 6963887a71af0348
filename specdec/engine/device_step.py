"""Verification on a device: all rows are decided on the device, and one copy brings the results to the host.

Every number that is read from a device costs a wait. So the arrays that a step needs go there with its rows, in one
copy (``arrays``). Processors, argmax, draws and the computations of ``reject`` and ``typical`` run on the device for
all rows. The numbers that verification and the drafter read come back in one copy (``verify``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.drafter import DeviceStep, DraftSession, ReadbackSession
from specdec.runners.sent_rows import SentText
from specdec.sampling.sampler import Sampler
from specdec.sampling.scores import Scores, finite_argmax
from specdec.sampling.verify import (
    Readback,
    Verdict,
    Verification,
    Verifier,
    longest,
    match,
    place_of,
    reject,
    rejecting,
    verifier_for,
    verify,
)
from specdec.step.later import Later
from specdec.step.step_io import StepInput
from specdec.step.tree import Draft
from specdec.target import TargetOutput

__all__ = ["DeviceVerification", "decide", "last_row", "paths_of", "walk_arrays"]

Judge = Callable[[Sequence[list[Any]]], Verdict]
"""Computes a rule's verdict from the numbers of the tensors that it reads."""


class DeviceVerification(Verification):
    """Verifies a sequence's drafts with one copy to the device and one copy back, which it may share with others.

    Args:
        sampler: the sequence's sampler.
        session: the sequence's drafting session; None for steps in which it reads nothing.
        top_k: how many of each scored row's likeliest tokens the session reads.
        reads_scores: whether anything reads a verdict's scores.
    """

    def __init__(
        self, sampler: Sampler, session: DraftSession | None, top_k: int, *, reads_scores: bool = True
    ) -> None:
        super().__init__(sampler)
        self._top_k, self._reads_scores = top_k, reads_scores
        self._session = session if isinstance(session, ReadbackSession) else None

    def prepare(self, draft: Draft) -> Draft:
        return draft.on_host() if self.sampler.reads_drafts else draft

    def arrays(self, draft: Draft, rows: Sequence[int] | None) -> Mapping[str, npt.NDArray[Any]]:
        arrays = {} if self._session is None else walk_arrays(draft, Scores(torch.empty(0), rows).place)
        if rows is not None:
            arrays["rows"] = np.array(rows, dtype=np.int64)
        unread = self.sampler.unread
        if unread is not None and self.sampler.takes_together:
            arrays["unread"] = np.array(unread, dtype=np.int64)
            arrays["paths"] = paths_of(draft, range(len(draft)) if rows is None else rows)
        return arrays

    def read(self, draft: Draft, step: StepInput, output: TargetOutput) -> Readback | None:
        rows, sampler, late = step.wanted.scored, self.sampler, draft.tokens if type(draft.tokens) is Later else None
        if not sampler.takes_together:
            return None  # its processors read each row themselves
        if not (self._session or self._top_k > 1 or late or sampler.sample or sampler.processors):
            return self._likeliest(draft, rows, output)
        scores = output.scores(rows)
        rule = verifier_for(sampler.params, draft, sampling=sampler.sample)
        picked = scores.device_picked() if sampler.draws_there and rule is match else None  # drawn with the logits
        depths = self._process(draft, scores, output) if picked is None else []
        read, judge = _read_of(rule, draft, scores, sampler)
        best, own = decide(sampler, scores, () if rule is reject else depths)
        if picked is not None:
            own = picked[0][picked[1] : picked[2]]
        top = [scores.top(self._top_k)] if self._top_k > 1 else []
        if top and sampler.sample:
            top.append(scores.logits.gather(1, top[0]).float())
        asked = None if rule is not match else self._readback(draft, step, scores, output, own)
        tokens = [] if late is None else [late.tensor]
        drawn = [] if own is best else [own if picked is None else picked[0]]
        tensors = [*drawn, *read, *top, *tokens, *([] if asked is None else [asked])]
        argmax, first, last = scores.device_argmax()

        def verdict_of(found: Sequence[list[Any]]) -> Verdict:
            numbers = iter(found)
            most = next(numbers)[first:last]
            decided = next(numbers) if drawn else most
            if picked is not None:
                decided = decided[picked[1] : picked[2]]
            judged = [next(numbers) for _ in read]
            scores.decided(most, () if rule is reject else decided, *(next(numbers) for _ in top))
            if late is not None:
                late.known(next(numbers))
            verdict = verify(scores, draft, sampler) if judge is None else judge(judged)
            verdict.scores, verdict.readback = scores, next(numbers, None)
            return verdict

        device = best.device
        return Readback([argmax, *(tensor.to(device) for tensor in tensors)], verdict_of)

    def _likeliest(self, draft: Draft, rows: Sequence[int] | None, output: TargetOutput) -> Readback:
        """The readback of a greedy step without other reads: one tensor, the argmax of all sequences' rows."""
        argmax, first, last = output.likeliest(rows)

        def verdict_of(found: Sequence[list[Any]]) -> Verdict:
            best = found[0][first:last]
            # Of the root alone nothing is walked. A token below 0 stands for logits that are none, which match refuses.
            alone = last - first == 1 and best[0] >= 0
            if alone and not self._reads_scores:
                return Verdict([0], best)
            scores = output.scores(rows)
            scores.decided(best, best)
            verdict = Verdict([0], best) if alone else match(draft, scores, self.sampler)
            verdict.scores = scores
            return verdict

        return Readback([argmax], verdict_of)

    def decides(self, draft: Draft) -> npt.NDArray[np.bool_] | None:
        """Where ``match`` decides, by the argmax of logits or by draws at a temperature alone."""
        sampler = self.sampler
        if verifier_for(sampler.params, draft, sampling=sampler.sample) is not match:
            return None
        if not (sampler.draws_there if sampler.sample else not sampler.processors):
            return None
        rows = np.ones(len(draft), dtype=np.bool_)
        rows[[*draft.probes]] = False
        return rows

    def verify(self, draft: Draft, step: StepInput, output: TargetOutput) -> Verdict:
        readback = self.read(draft, step, output)
        if readback is None:
            return super().verify(draft, step, output)
        Readback.copy([readback])
        return readback.verdict()

    def _process(self, draft: Draft, scores: Scores, output: TargetOutput) -> list[int]:
        """Apply the processors to the scored rows, without a copy to the host; returns the rows' depths."""
        rows = range(len(draft)) if scores.rows is None else scores.rows
        depths = [draft.depths[row] for row in rows]
        if self.sampler.processors:
            device = scores.logits.device
            paths = unread = torch.empty(0, dtype=torch.long, device=device)
            there = _sent(output)
            if "paths" in there.sent:
                sent = there.sent["paths"]
                paths = there.tokens[0].index_select(0, sent.flatten()).view(sent.shape).to(device)
                unread = there.sent["unread"].to(device)
            scores.processed = self.sampler.together(
                scores.logits, paths, unread, depths, lambda place: draft.path_tokens(rows[place])
            )
        return depths

    def _readback(
        self, draft: Draft, step: StepInput, scores: Scores, output: TargetOutput, own: torch.Tensor
    ) -> torch.Tensor | None:
        """The tensor that the session reads back; ``own``: the target's token after each scored row, on the device."""
        if self._session is None:
            return None
        walked = scores.device_walked() if step.wanted.decide is not None else None
        if walked is not None:
            return self._session.readback(DeviceStep(scores, output.taps, walked[:1], walked[1:2], walked[2:]))
        device, there = own.device, _sent(output)
        arrays = (
            there.tokens[0],
            there.sent["parent_places"],
            there.sent["eligible"],
            there.seen(len(draft), device),
        )
        last = last_row(own, *(tensor.to(device) for tensor in arrays))
        depth = arrays[-1].to(device).index_select(0, last).sum(1) - 1
        place = torch.searchsorted(there.sent["rows"].to(device), last) if "rows" in there.sent else last
        return self._session.readback(DeviceStep(scores, output.taps, last, depth, own.index_select(0, place)))


def _sent(output: TargetOutput) -> SentText:
    """A sequence's rows as they were run, with what went to the device."""
    rows = output.rows
    assert isinstance(rows, SentText)
    return rows


def paths_of(draft: Draft, rows: Sequence[int]) -> npt.NDArray[np.int64]:
    """[R, D] per given row the rows of its path below the root, the row itself last; padded with the root."""
    paths = np.zeros((len(rows), max(draft.depths)), dtype=np.int64)
    for own, row in zip(paths, rows, strict=True):
        while row > 0:
            own[draft.depths[row] - 1], row = row, draft.parents[row]
    return paths


def walk_arrays(draft: Draft, place: Callable[[int], int]) -> dict[str, npt.NDArray[Any]]:
    """Arguments of :func:`last_row`: per row the place of its parent's logits, and whether it may be accepted.

    ``place`` maps a scored row to its row of the logits. Of equal siblings the first counts, as in ``match``.
    """
    places, eligible, seen = [0], [True], set[tuple[int, int]]()
    unscored = draft.probes.difference(draft.read)
    for row in range(1, len(draft)):
        parent = draft.parents[row]
        known = (parent, draft.tokens[row])
        fit = row not in draft.probes and parent not in unscored and known not in seen
        if fit:
            seen.add(known)
        places.append(place(parent) if fit else 0)
        eligible.append(fit)
    return {"parent_places": np.array(places, dtype=np.int64), "eligible": np.array(eligible, dtype=np.bool_)}


def last_row(
    own: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor, eligible: torch.Tensor, closure: torch.Tensor
) -> torch.Tensor:
    """int64 [1], the last row of the path that ``match`` accepts, computed without a copy to the host.

    Args:
        own: [R] the target's token after each scored row.
        tokens: [T] the draft's tokens.
        places, eligible: [T], see :func:`walk_arrays`.
        closure: [T, T] bool, whether row i sees row j.
    """
    wrong = (own.index_select(0, places) != tokens) | ~eligible
    wrong[:1] = False
    accepted = ~(closure & wrong).any(-1)
    # The accepted path is the longest one; its length is the number of rows that its last row sees.
    return (accepted * closure.sum(-1)).argmax(-1, keepdim=True)


def decide(sampler: Sampler, scores: Scores, depths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int64 [R] on the device: argmax of each scored row's raw logits, and the target's token after the row.

    ``depths`` are the rows' depths, or empty if the second result is not needed. With processors, ``scores.processed``
    must be set. A row whose logits are no distribution gets -1.
    """
    argmax, first, last = scores.device_argmax()
    best = own = argmax[first:last]
    if not depths:
        return best, best
    logits = scores.logits if scores.processed is None else scores.processed
    if sampler.sample:
        noise = {depth: sampler.noise.gumbel(len(sampler.tokens) + depth) for depth in sorted(set(depths))}
        own = finite_argmax(torch.stack([noise[depth] for depth in depths]) + logits)
    elif sampler.processors:
        own = finite_argmax(logits)
    return best, own


def _read_of(rule: Verifier, draft: Draft, scores: Scores, sampler: Sampler) -> tuple[list[torch.Tensor], Judge | None]:
    """The tensors that a rule reads, and its verdict by their numbers; ``match`` needs ``decide`` only."""

    if rule is match:
        return [], None
    return (rejecting if rule is reject else _typical)(draft, scores, sampler)


def _typical(draft: Draft, scores: Scores, sampler: Sampler) -> tuple[list[torch.Tensor], Judge]:
    """The tensors that ``typical`` reads, and its verdict; the target's tokens are decided already."""
    below = draft.children()
    above = [row for row in range(len(draft)) if below[row]]
    chances = {row: sampler.probabilities(scores, row, []) for row in above}
    entropies = [torch.special.entr(p).sum()[None] for p in chances.values()]
    numbers = [p[place_of(draft, child, p.device)] for row, p in chances.items() for child in below[row]]

    def judge(found: Sequence[list[Any]]) -> Verdict:
        left = iter(found[0][len(above) :])
        known = {
            row: (entropy, [next(left) for _ in below[row]]) for row, entropy in zip(above, found[0], strict=False)
        }

        def read(row: int, children: Sequence[int], tokens: Sequence[int]) -> tuple[float, list[float]]:
            if math.isnan(known[row][0]):
                sampler.distribution(scores, row, tokens)  # raises an error with the reason
            return known[row]

        return longest(draft, scores, sampler, read)

    return [torch.cat([*entropies, *numbers]) if above else scores.logits.new_empty(0)], judge
