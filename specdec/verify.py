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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.draft import Draft
from specdec.errors import DraftError
from specdec.sampling import Noise, Sampler, SamplingParams, Scores

__all__ = ["Verdict", "Verifier", "last_row", "match", "reject", "typical", "verifier_for", "verify", "walk_arrays"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``path``: accepted rows, ascending, the root first; ``tokens``: as many, the last one being the bonus token."""

    path: list[int]
    tokens: list[int]

    def cut(self, count: int) -> Verdict:
        """The first ``count`` tokens and the rows that then are committed; the last token is the next root."""
        return self if count == len(self.tokens) else Verdict(self.path[:count], self.tokens[:count])


Verifier = Callable[[Draft, Scores, Sampler], Verdict]


def verifier_for(params: SamplingParams, draft: Draft, *, sampling: bool) -> Verifier:
    """The rule that ``params.acceptance`` means for this draft."""
    if params.acceptance == "typical":
        return typical
    if not sampling or params.acceptance == "match":
        return match
    if params.acceptance == "reject" or draft.q:
        return reject
    return match


def verify(scores: Scores, draft: Draft, sampler: Sampler) -> tuple[Verdict, Scores]:
    """The verdict by the scores of the draft's rows, and what a session may read of them."""
    return verifier_for(sampler.params, draft, sampling=sampler.sample)(draft, scores, sampler), scores


def match(draft: Draft, scores: Scores, sampler: Sampler) -> Verdict:
    """Follow the target's own tokens through the draft."""
    row, path, tokens = 0, [0], list[int]()
    while True:
        token = sampler.token(scores, row, tokens)
        tokens.append(token)
        child = draft.child(row, token)
        if child is None:
            return Verdict(path, tokens)
        path.append(child)
        row = child


def walk_arrays(draft: Draft, place: Callable[[int], int]) -> dict[str, npt.NDArray[Any]]:
    """What :func:`last_row` needs: per row, where its parent's logits are, and whether it may be accepted.

    ``place`` says where a scored row stands among the logits. Of equal siblings the first counts, as in ``match``.
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
    """int64 [1], the row with which ``match`` ends its path, without a copy to the host.

    Args:
        own: [R] the target's own token after each scored row.
        tokens: [T] the draft's.
        places, eligible: of :func:`walk_arrays`, [T].
        closure: [T, T] bool, whether row i sees row j.
    """
    wrong = (own.index_select(0, places) != tokens) | ~eligible
    wrong[:1] = False
    accepted = ~(closure & wrong).any(-1)
    # The path is the longest accepted one, and its rows are those that its end sees.
    return (accepted * closure.sum(-1)).argmax(-1, keepdim=True)


def reject(draft: Draft, scores: Scores, sampler: Sampler) -> Verdict:
    """Traverse the tree bottom-up, accepting the first node whose coin says so.

    Per node: ``alpha``, the probability that the node is kept once all below it is rejected, and ``p``, the residual
    target. A child x takes ``alpha_x = min(1, alpha p(x) / q(x))``. When x's whole subtree has been rejected, the rest
    is ``(alpha p - q)+``, with mass R: p becomes its normalisation, alpha becomes ``R / (R + 1 - alpha)``, and q loses
    x. The root has alpha 1 and keeps it.
    """
    below = draft.children()
    left: dict[int, torch.Tensor] = {}  # row -> the residual target once all below it is rejected
    order: list[int] = []  # in which rows are judged
    children: list[int] = []
    alphas: list[torch.Tensor] = []  # of the rows in order
    masses: list[torch.Tensor] = []  # of the children
    sums: list[torch.Tensor] = []  # of all rows' probabilities
    prefixes: dict[int, tuple[list[int], list[int]]] = {}  # row -> path to it, and its tokens

    def visit(row: int, alpha: torch.Tensor | None, path: list[int], tokens: list[int]) -> None:
        p = sampler.probabilities(scores, row, tokens)
        alpha = torch.ones_like(p[0]) if alpha is None else alpha
        prefixes[row] = path, tokens
        sums.append(p.sum())
        q = draft.q.get(row)
        if q is not None:
            q = q.to(p.device, p.dtype)
        for child in below[row]:
            token = draft.tokens[child]
            drawn = _point(p, token) if q is None else q
            children.append(child)
            masses.append(drawn[token])
            visit(child, (alpha * p[token] / drawn[token]).clamp(max=1.0), [*path, child], [*tokens, token])
            rest = (alpha * p - drawn).clamp_(min=0)
            total = rest.sum()
            p = torch.where(total > 0, rest / total, p)
            mass = total + 1 - alpha
            alpha = torch.where(mass > 0, total / mass, 0.0)
            if q is not None:
                q = q.clone()
                q[token] = 0
                mass = q.sum()
                q = torch.where(mass > 0, q / mass, q)
        order.append(row)
        alphas.append(alpha)
        left[row] = p

    visit(0, None, [0], [])
    # No row's numbers depend on a coin: a device computes them all, and they are copied at once.
    numbers = torch.stack([*alphas, *sums, *masses]).tolist()
    rows = len(order)
    for row, total in zip(prefixes, numbers[rows : 2 * rows], strict=True):
        if math.isnan(total):
            sampler.distribution(scores, row, prefixes[row][1])  # which says what is wrong with it
    for child, mass in zip(children, numbers[2 * rows :], strict=True):
        if not mass > 0:
            raise DraftError(
                f"row {child} holds token {draft.tokens[child]}, to which the q of row {draft.parents[child]} gives "
                f"probability {mass}; set q only for children that were drawn from it, without replacement"
            )
    position = len(sampler.tokens)
    coin = partial(sampler.noise.uniform, position, Noise.COIN)
    kept = next(row for row, alpha in zip(order, numbers, strict=False) if row == 0 or coin(row) < alpha)
    path, tokens = prefixes[kept]
    return Verdict(path, [*tokens, sampler.noise.draw(left[kept], position, Noise.COIN, len(draft) + kept)])


def _point(like: torch.Tensor, token: int) -> torch.Tensor:
    point = torch.zeros_like(like)
    point[token] = 1
    return point


def typical(draft: Draft, scores: Scores, sampler: Sampler) -> Verdict:
    """Keep the longest path of tokens with ``p > min(epsilon, delta exp(-H(p)))``. Lossy."""
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
        p = sampler.distribution(scores, row, tokens)
        entropy = float(torch.special.entr(p).sum())
        bar = min(params.typical_epsilon, params.typical_delta * math.exp(-entropy))
        for child in reversed(below[row]):
            if float(p[draft.tokens[child]]) > bar:
                stack.append((child, [*path, child], [*tokens, draft.tokens[child]]))
    path, tokens = best
    return Verdict(path, [*tokens, sampler.token(scores, path[-1], tokens)])
