"""Verification on a device: all rows are decided there, and the step's one copy brings the results to the host.

Every number that is read from a device costs a wait. So what a step needs goes there with its rows, in one copy
(:class:`specdec.step.step_io.Wanted`). Processors, argmax, draws and the computations of ``reject`` and ``typical`` run
there for all rows. The numbers that verification and the drafter read come back in one copy (:func:`verifying`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.drafter import DeviceStep, ReadbackSession
from specdec.sampling.sampler import Sampler
from specdec.sampling.verify import Judge, Verdict, longest, match, place_of, reject, rejecting, verifier_for
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput, finite_argmax
from specdec.step.tree import Draft

__all__ = ["decide", "may_accept", "verifying"]

Marks = npt.NDArray[np.bool_] | None  # [T]


def may_accept(draft: Draft, sampler: Sampler, *, walks: bool) -> tuple[Marks, bool]:
    """The rows that ``match`` may accept, and whether the executor decides, as by :class:`specdec.step.step_io.Walk`.

    It does where argmax or draws at a temperature alone decide. Where processors do, rows are marked only if a session
    asks for the path (``walks``).
    """
    if verifier_for(sampler.params, draft, sampling=sampler.sample) is not match:
        return None, False
    alone = sampler.draws_there if sampler.sample else not sampler.processors
    if not (alone or walks):
        return None, False
    rows = np.ones(len(draft), dtype=np.bool_)
    rows[[*draft.probes]] = False
    return rows, alone


def verifying(
    draft: Draft, step: StepInput, output: StepOutput, sampler: Sampler, session: ReadbackSession | None
) -> tuple[list[torch.Tensor], Judge]:
    """Begin to verify a sequence's draft as :func:`specdec.sampling.verify.verify` does, without a copy of its own.

    ``sampler``: one that ``takes_together``. ``session``: what reads numbers back; None for none.

    Returns:
        The tensors to copy to the host, and a function from their numbers to the verdict.
    """
    rule = verifier_for(sampler.params, draft, sampling=sampler.sample)
    drawn = rule is match and sampler.draws_there and output.picked is not None  # with the logits
    own, read, judge = None, list[torch.Tensor](), None
    if (sampler.sample or sampler.processors) and not drawn:
        depths = _process(draft, output, sampler)
        own = None if rule is reject else decide(sampler, output, depths)
    if rule is not match:
        read, judge = (rejecting if rule is reject else _typical)(draft, output, sampler)
    asked = None if session is None or rule is not match else session.readback(_ended(step, output, own, drawn))
    tensors = [own, *read, draft.on_device, asked]

    def told(found: Sequence[list[Any]]) -> Verdict:
        numbers = iter(found)
        if own is not None:
            output.own = next(numbers)
        judged = [next(numbers) for _ in read]
        if draft.on_device is not None:
            draft.on_host(next(numbers))
        verdict = rule(draft, output, sampler) if judge is None else judge(judged)
        verdict.readback = next(numbers, None)
        return verdict

    return [tensor for tensor in tensors if tensor is not None], told


def _process(draft: Draft, output: StepOutput, sampler: Sampler) -> list[int]:
    """Apply the processors to the scored rows, without a copy to the host; returns the rows' depths."""
    rows = range(len(draft)) if output.rows is None else output.rows
    depths = [draft.depths[row] for row in rows]
    if sampler.processors:
        device = output.given.device
        paths = unread = torch.empty(0, dtype=torch.long, device=device)
        if sampler.unread is not None:
            there = output.there
            paths, unread = there.paths(device), there.sent["unread"].to(device)
        output.processed = sampler.together(
            output.given, paths, unread, depths, lambda place: draft.path_tokens(rows[place])
        )
    return depths


def _ended(step: StepInput, output: StepOutput, own: torch.Tensor | None, drawn: bool) -> DeviceStep:
    """What a session may read of the step; ``own``: the target's token after each row, where it was decided apart."""
    picked = output.picked
    if step.wanted.decides and picked is not None:
        walked = picked[0, 2:]
    else:
        decided = output.argmax_there if picked is None or not drawn else picked[:, 1]
        walked = output.there.walk(decided if own is None else own)
    return DeviceStep(output, walked[:1], walked[1:2], walked[2:])


def decide(sampler: Sampler, output: StepOutput, depths: Sequence[int]) -> torch.Tensor:
    """Int64 [R] on the device: the target's token after each scored row; -1 where its scores are no distribution.

    ``depths`` are the rows' depths. With processors, ``output.processed`` must be set.
    """
    logits = output.given if output.processed is None else output.processed
    if sampler.sample:
        noise = {depth: sampler.noise.gumbel(len(sampler.tokens) + depth) for depth in sorted(set(depths))}
        return finite_argmax(torch.stack([noise[depth] for depth in depths]) + logits)
    return finite_argmax(logits)


def _typical(draft: Draft, output: StepOutput, sampler: Sampler) -> tuple[list[torch.Tensor], Judge]:
    """The tensors that ``typical`` reads, and its verdict; the target's tokens are decided already."""
    below = draft.children()
    above = [row for row in range(len(draft)) if below[row]]
    chances = {row: sampler.probabilities(output, row, []) for row in above}
    entropies = [torch.special.entr(p).sum()[None] for p in chances.values()]
    numbers = [p[place_of(draft, child, p.device)] for row, p in chances.items() for child in below[row]]

    def judge(found: Sequence[list[Any]]) -> Verdict:
        left = iter(found[0][len(above) :])
        known = {
            row: (entropy, [next(left) for _ in below[row]]) for row, entropy in zip(above, found[0], strict=False)
        }

        def read(row: int, children: Sequence[int], tokens: Sequence[int]) -> tuple[float, list[float]]:
            if math.isnan(known[row][0]):
                sampler.distribution(output, row, tokens)  # raises an error with the reason
            return known[row]

        return longest(draft, output, sampler, read)

    return [torch.cat([*entropies, *numbers]) if above else output.given.new_empty(0)], judge
