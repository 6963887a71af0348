"""Recycled distributions: the target's distributions of earlier steps, ranked with the noise of the next draw.

When sampling, the likeliest token is often not the one that is drawn. The target draws the token of a position with
noise that is known beforehand (:class:`specdec.sampling.noise.Noise`). So an estimate of its distribution, ranked with
the same noise, is a guess at its draw (Daliri, Musco and Suresh 2024, arXiv 2408.07978). The estimate after a token is
the mean of the target's latest distributions after it, or after the same two tokens if these are known.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from drafters.shared.calibration import Calibration
from drafters.shared.scored_tree import Guesses, ScoredTree
from specdec.costs.prices import Prices
from specdec.drafter import Context, Observation
from specdec.step.step_output import StepOutput
from specdec.step.tree import Draft, Hints

__all__ = ["KEPT", "Distributions", "DrawnSession", "Guess"]

KEPT = 32  # tokens of a distribution: noise lifts rare ones
_LATEST = 3  # distributions of which the mean is taken
_FALL = 1.8  # where logits are not at hand, they fall by the logarithm of the rank, so many times
_BY_RANK = array("f", [-_FALL * math.log(rank) for rank in range(1, KEPT + 1)])
_DOUBT = 2  # pairs of tokens in the prompt that are supposed to have gone on otherwise
_ERROR = 1.25  # by how many logits a guess is off, so that a lead by as many is e to one
_BEST = 8  # tokens of a guess that may be proposed
_PRIOR, _PRIOR_WEIGHT = 0.75, 8.0  # rows that are right for one that was promised, and the promises that it counts as
_FAINT = 0.02  # a row with a smaller reach is not considered


class Guess(NamedTuple):
    """What may come next: distributions, of which the mean is meant, and the chance that it is one of their tokens.

    Each is tokens ("q") and the target's logits of them ("f"), largest first.
    """

    known: Sequence[tuple[array[int], array[float]]]
    mass: float


class Distributions:
    """Token -> the target's distributions after it of late; and the same for pairs of tokens."""

    def __init__(self) -> None:
        self._of: dict[tuple[int | None, ...], tuple[tuple[array[int], array[float]], ...]] = {}
        self._pairs: dict[int, dict[int, int]] = {}  # of prompts

    def of(self, before: int | None, token: int, temperature: float) -> Guess | None:
        """What may come after ``before`` and ``token``, drawn at a temperature; None where nothing is known of them."""
        known = self._of.get((before, token)) or self._of.get((token,))
        if known:
            return Guess(known, 1.0)
        counts = self._pairs.get(token)
        if counts is None:
            return None
        best, whole = sorted(counts, key=lambda after: -counts[after]), sum(counts.values())
        logits = array("f", [temperature * math.log(counts[after]) for after in best])
        return Guess([(array("q", best), logits)], whole / (whole + _DOUBT))

    def read(self, tokens: Sequence[int]) -> None:
        """Count the pairs of a text, for tokens after which nothing else is known."""
        for token, after in pairwise(tokens):
            counts = self._pairs.setdefault(token, {})
            counts[after] = counts.get(after, 0) + 1

    def learn(self, before: int | None, token: int, tokens: Sequence[int], logits: Sequence[float]) -> None:
        """Store the target's latest distribution after a token and the token before it (None: there is none).

        Args:
            before, token: tokens of the text.
            tokens: distinct tokens that may follow.
            logits: logits of ``tokens``, the largest first.
        """
        kept = array("q", tokens), array("f", logits)
        for key in ((token,), (before, token)):
            self._of[key] = (*self._of.get(key, ())[1 - _LATEST :], kept)


class DrawnSession:
    """A sequence whose tokens are drawn with the target's own noise.

    Args:
        rows: rows below the root; None takes as many as pay, by what is expected of each.
        depth: of the tree.
        table: what is known so far.
    """

    def __init__(self, rows: int | None, depth: int, table: Distributions, context: Context) -> None:
        self._depth, self._table, self._context = depth, table, context
        self._weighs, self._most = rows is None, context.max_rows if rows is None else rows
        self._temperature = context.sampling.temperature
        self._prices = Prices(context.costs)
        self._least = self._prices.least_reach(context.prompt_length, self._most, _FAINT)
        self._calibration = Calibration(_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT)
        self._tokens, self._parents = [context.root], [-1]  # the latest draft, ...
        self._chances = [1.0]  # ... and each row's chance where its parent is right, as promised
        self._learns = True

    def propose(self, row_budget: int) -> Draft:
        context = self._context
        most, deepest = min(self._most, row_budget - 1), min(self._depth, context.remaining - 1)
        self._learns = row_budget > 1  # a plain step needs no successors, and reading them would be most of its time
        before = context.tokens[-2] if len(context.tokens) > 1 else None
        tree, sure = ScoredTree(context.root), self._calibration.share

        def guesses(row: int) -> Guesses:
            above = tree.tokens[tree.parents[row]] if row else before
            return self._after(above, tree.tokens[row], tree.depths[row])

        tree.grow(guesses, most, deepest, self._least if self._weighs else None, sure)
        size = 1 + self._prices.keep(tree.reach[1:], context.prompt_length) if self._weighs else len(tree)
        self._tokens, self._parents, self._chances = tree.tokens[:size], tree.parents[:size], tree.chances[:size]
        chances = [min(sure * chance, 1.0) for chance in self._chances]
        return Draft(self._tokens, self._parents, hints=Hints(chances=chances))

    def _after(self, before: int | None, token: int, depth: int) -> list[tuple[int, float]]:
        """What is likeliest to come after a token at a depth, likeliest first, with the chance of each."""
        guess = self._table.of(before, token, self._temperature)
        if guess is None:
            return []
        position = len(self._context.tokens) + depth
        tokens, sums = self._context.noise.ranked(guess.known, self._temperature, position, _BEST)
        if not tokens:
            return []
        # How far a guess is off has nothing to do with the temperature, by which the logits were divided.
        odds = [math.exp((one - sums[0]) * self._temperature / _ERROR) for one in sums]
        share = guess.mass / sum(odds)
        return [(one, odd * share) for one, odd in zip(tokens, odds, strict=True)]

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        assert seen.scores is not None
        right, count = {0: 0}, len(seen.tokens)  # row that the text went through -> its depth
        for row in range(1, len(self._tokens)):
            depth = right.get(self._parents[row])
            if depth is not None:
                hit = self._tokens[row] == seen.tokens[depth]
                self._calibration.learn(self._chances[row], hit)
                if hit and depth + 1 < count:
                    right[row] = depth + 1
        if self._learns:
            self._learn(seen.draft, seen.path, len(seen.tokens), seen.scores)

    def _allowed(self, logits: Sequence[float]) -> int:
        """How many tokens, of these logits, largest first, top-k, top-p and min-p let be drawn."""
        params = self._context.sampling
        if not params.top_k and params.top_p == 1 and params.min_p == 0:
            return len(logits)
        odds = [math.exp((one - logits[0]) / self._temperature) for one in logits[: params.top_k or None]]
        most = params.top_p * sum(odds)
        above = accumulate(odds, initial=0.0)
        return sum(odd >= params.min_p and before < most for odd, before in zip(odds, above, strict=False))

    def _learn(self, draft: Draft, path: Sequence[int], emitted: int, scores: StepOutput) -> None:
        """Store the target's distribution after each scored row, those after accepted rows last."""
        text = self._context.tokens
        rows = scores.rows if scores.rows is not None else range(len(draft))
        tokens, logits = scores.weighed(min(KEPT, self._context.target.vocab_size))
        if logits is None:
            logits = [_BY_RANK[: len(row)] for row in tokens]
        accepted = set(path)
        for place in sorted(range(len(rows)), key=lambda one: rows[one] in accepted):
            row, count = rows[place], self._allowed(logits[place])
            above = draft.tokens[draft.parents[row]] if row else text[-emitted - 2] if len(text) > emitted + 1 else None
            self._table.learn(above, draft.tokens[row], tokens[place][:count], logits[place][:count])
