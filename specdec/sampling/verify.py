"""Verification: which rows of a draft the target accepts, and the token that it adds.

Every rule returns a path from the root and one token per row of it: the tokens of the path's rows after the root, then
the *bonus* token, which the target emits whether or not a draft row was right.

``match``
    Draw from the target at the root; where a child holds that token, go there and draw again. Lossless for any draft,
    and at a given seed the text is plain decoding's token for token.
``reject``
    Speculative sampling for drafts drawn from a distribution q. On a chain it is block verification (Sun et al. 2024,
    arXiv 2403.10444), on a tree traversal verification (Weng et al. 2025, arXiv 2505.12398); the two coincide on
    chains, and a child that was chosen and not drawn counts as drawn from the distribution with all mass on it.
``typical``
    Medusa's rule (Cai et al. 2024, section 2.3.1). Lossy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from specdec.errors import DraftError
from specdec.sampling.noise import Noise
from specdec.sampling.sampler import Sampler
from specdec.settings.sampling_params import SamplingParams
from specdec.step import device_copies
from specdec.step.step_output import StepOutput
from specdec.step.tree import Draft

__all__ = [
    "Judge",
    "Verdict",
    "Verifier",
    "longest",
    "match",
    "place_of",
    "reject",
    "rejecting",
    "typical",
    "verifier_for",
    "verify",
]


@dataclass(slots=True)
class Verdict:
    """The result of verification.

    Attributes:
        path: accepted rows, ascending, the root first.
        tokens: one token per accepted row; the last one is the bonus token.
        readback: the result of the session's ``readback``, see :class:`specdec.drafter.ReadbackSession`.
    """

    path: Sequence[int]
    tokens: Sequence[int]
    readback: Sequence[int] | None = field(default=None, compare=False)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` tokens and as many rows; the last token kept is the next root."""
        if count < len(self.tokens):
            self.path, self.tokens = self.path[:count], self.tokens[:count]


Verifier = Callable[[Draft, StepOutput, Sampler], Verdict]
Judge = Callable[[Sequence[list[Any]]], Verdict]
"""From numbers of a step, once they are on the host, to its verdict."""


def verifier_for(params: SamplingParams, draft: Draft, *, sampling: bool) -> Verifier:
    """The verification rule of ``params.acceptance`` for this draft."""
    if params.acceptance == "typical":
        return typical
    if not sampling or params.acceptance == "match":
        return match
    if params.acceptance == "reject" or draft.q:
        return reject
    return match


def verify(draft: Draft, output: StepOutput, sampler: Sampler) -> Verdict:
    """Verify a draft by its rows' output; where ranks share the rows, by all ranks'."""
    rule = verifier_for(sampler.params, draft, sampling=sampler.sample)
    return rule(draft, output, sampler) if output.join is None else output.join(rule, draft, output, sampler)


def match(draft: Draft, output: StepOutput, sampler: Sampler) -> Verdict:
    """Follow the target's own tokens through the draft."""
    greedy = sampler.greedy  # then the sampler need not be asked
    end, path, tokens = 0, [0], [output.argmax(0) if greedy else sampler.token(output, 0, [])]
    proposed, parents, probes = draft.tokens, draft.parents, draft.probes
    for row in range(1, len(proposed)):  # children come after their parents
        if parents[row] == end and proposed[row] == tokens[-1] and row not in probes:
            path.append(row)
            tokens.append(output.argmax(row) if greedy else sampler.token(output, row, tokens))
            end = row
    return Verdict(path, tokens)


def reject(draft: Draft, output: StepOutput, sampler: Sampler) -> Verdict:
    """Traverse the tree bottom-up, accepting the first node whose coin says so.

    Each node has ``alpha``, the probability that it is kept once all below it is rejected, and ``p``, the residual
    target. A child x gets ``alpha_x = min(1, alpha p(x) / q(x))``. When x's whole subtree has been rejected, the rest
    is ``(alpha p - q)+``, with mass R: p becomes its normalisation, alpha becomes ``R / (R + 1 - alpha)``, and x is
    removed from q. The root has alpha 1 and keeps it.
    """
    tensors, judge = rejecting(draft, output, sampler, ahead=False)
    return judge(device_copies.copy_out(tensors))


def rejecting(
    draft: Draft, output: StepOutput, sampler: Sampler, *, ahead: bool = True
) -> tuple[list[torch.Tensor], Judge]:
    """The tensors that ``reject`` reads, still on their device, and a function from their numbers to the verdict.

    No row's numbers depend on a coin. The function needs the draft's tokens. ``ahead``: the bonus tokens of all rows
    are among the tensors, so that the function reads no more.
    """
    traversal = _Traversal(draft, output, sampler)
    position, order, none = len(sampler.tokens), [*traversal.left], traversal.sums[0][:0]
    every = traversal.alphas, traversal.sums, traversal.masses, traversal.totals, traversal.least
    tensors = [torch.cat([none, *numbers.values()]) for numbers in every]
    if ahead:
        rows = torch.stack([*traversal.left.values()])
        tensors.append(sampler.noise.draws(rows, position, Noise.COIN, [len(draft) + row for row in order]))

    def judge(numbers: Sequence[list[Any]]) -> Verdict:
        for row, total in zip(traversal.sums, numbers[1], strict=True):
            if math.isnan(total):
                sampler.distribution(output, row, draft.path_tokens(row))  # raises an error with the reason
        for row, total, least in zip(traversal.totals, numbers[3], numbers[4], strict=True):
            if not (least >= 0 and 0 < total < math.inf):
                raise DraftError(
                    f"the q of row {row} is no distribution: its sum is {total}, its smallest number {least}; set q to "
                    "what the row's children were drawn from"
                )
        for child, mass in zip(traversal.masses, numbers[2], strict=True):
            if not mass > 0:
                raise DraftError(
                    f"row {child} holds token {draft.tokens[child]}, to which the q of row {draft.parents[child]} "
                    f"gives probability {mass}; set q only for children that were drawn from it, without replacement"
                )
        coin = partial(sampler.noise.uniform, position, Noise.COIN)
        chances = zip(order, numbers[0], strict=True)
        kept = next(row for row, alpha in chances if row == 0 or coin(row) < alpha)
        if ahead:
            bonus = numbers[-1][order.index(kept)]
        else:
            bonus = sampler.noise.draw(traversal.left[kept], position, Noise.COIN, len(draft) + kept)
        return Verdict(traversal.paths[kept], [*draft.path_tokens(kept), bonus])

    return tensors, judge


class _Traversal:
    """The traversal of a draft under ``reject``: tensors by row, on the logits' device.

    Attributes:
        left: [V] the residual target once all below the row is rejected, in the order in which rows are judged.
        alphas: [1] probability to keep the row, in the same order.
        sums: [1] sum of the row's probabilities, in the order in which rows are visited.
        masses: [1] probability of a child under its parent's q, in the order of the children.
        totals, least: [1] sum of a row's q as given, and its smallest number.
        paths: the rows from the root down to the row.
    """

    def __init__(self, draft: Draft, output: StepOutput, sampler: Sampler) -> None:
        self._draft, self._output, self._sampler = draft, output, sampler
        self._below, self._late = draft.children(), draft.on_device is not None
        self.left: dict[int, torch.Tensor] = {}
        self.alphas: dict[int, torch.Tensor] = {}
        self.sums: dict[int, torch.Tensor] = {}
        self.masses: dict[int, torch.Tensor] = {}
        self.totals: dict[int, torch.Tensor] = {}
        self.least: dict[int, torch.Tensor] = {}
        self.paths: dict[int, list[int]] = {}
        self._visit(0, None, [0])

    def _visit(self, row: int, alpha: torch.Tensor | None, path: list[int]) -> None:
        tokens = [] if self._late else [self._draft.tokens[above] for above in path[1:]]
        p = self._sampler.probabilities(self._output, row, tokens)
        alpha = torch.ones_like(p[:1]) if alpha is None else alpha
        self.paths[row] = path
        self.sums[row] = p.sum()[None]
        q = self._draft.q.get(row)
        if q is not None:
            q = q.to(p.device, p.dtype)
            self.totals[row], self.least[row] = q.sum()[None], q.min()[None]
            q = q / self.totals[row]  # in half precision the sum may be far from 1
        children = self._below[row]
        for child in children:
            token = place_of(self._draft, child, p.device)
            drawn = _with(torch.zeros_like(p), token, 1.0) if q is None else q
            self.masses[child] = drawn[token]
            self._visit(child, (alpha * p[token] / drawn[token]).clamp(max=1.0), [*path, child])
            rest = (alpha * p - drawn).clamp_(min=0)
            total = rest.sum()
            p = torch.where(total > 0, rest / total, p)
            mass = total + 1 - alpha
            alpha = torch.where(mass > 0, total / mass, 0.0)
            if q is not None and child != children[-1]:
                q = _with(q, token, 0.0)
                mass = q.sum()
                q = torch.where(mass > 0, q / mass, q)
        self.alphas[row], self.left[row] = alpha, p


def place_of(draft: Draft, row: int, device: torch.device) -> slice | torch.Tensor:
    """The place of a row's token in [V]; a tensor where a device may still be drawing the token."""
    if draft.on_device is not None:
        return draft.on_device[row : row + 1].to(device)
    return slice(draft.tokens[row], draft.tokens[row] + 1)


def _with(values: torch.Tensor, token: slice | torch.Tensor, number: float) -> torch.Tensor:
    """[V] values with the number at one token replaced."""
    if isinstance(token, torch.Tensor):
        return values.index_fill(0, token, number)  # the number is a kernel's argument; an assignment would copy it
    values = values.clone()
    values[token] = number
    return values


def typical(draft: Draft, output: StepOutput, sampler: Sampler) -> Verdict:
    """Keep the longest path of tokens with ``p > min(epsilon, delta exp(-H(p)))``. Lossy."""

    def read(row: int, children: Sequence[int], tokens: Sequence[int]) -> tuple[float, list[float]]:
        p = sampler.distribution(output, row, tokens)
        return float(torch.special.entr(p).sum()), [float(p[draft.tokens[child]]) for child in children]

    return longest(draft, output, sampler, read)


def longest(
    draft: Draft,
    output: StepOutput,
    sampler: Sampler,
    read: Callable[[int, Sequence[int], Sequence[int]], tuple[float, list[float]]],
) -> Verdict:
    """The verdict of ``typical``; ``read`` returns a row's entropy and the probabilities of its children."""
    below = draft.children()
    best: tuple[list[int], list[int]] = ([0], [])
    stack: list[tuple[int, list[int], list[int]]] = [(0, [0], [])]
    params = sampler.params
    while stack:
        row, path, tokens = stack.pop()
        if len(path) > len(best[0]):
            best = (path, tokens)
        if not below[row]:
            continue
        entropy, chances = read(row, below[row], tokens)
        bar = min(params.typical_epsilon, params.typical_delta * math.exp(-entropy))
        for child, chance in zip(reversed(below[row]), reversed(chances), strict=True):
            if chance > bar:
                stack.append((child, [*path, child], [*tokens, draft.tokens[child]]))
    path, tokens = best
    return Verdict(path, [*tokens, sampler.token(output, path[-1], tokens)])
