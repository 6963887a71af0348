"""What sessions of heads share: hidden states that wait, guesses ranked or drawn, and what they have been worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafters.shared.own_cache import OwnCache
from drafters.shared.scored_tree import Margin
from drafters.shared.vocabulary import DraftVocabulary, coupled, processed, top_k
from specdec.costs.curve import pass_price
from specdec.drafter import BatchedSession, Context, Observation
from specdec.errors import ConfigError, shown
from specdec.sampling.noise import Noise
from specdec.step import device_copies
from specdec.step.cache import KVCache, LayerSpec

__all__ = ["HeadSession", "Ranked", "check_chance"]

Ranked = Sequence[tuple[int, float]]  # likeliest tokens first, each with the chance that it is the target's choice

_CHUNK = 512  # rows of text that a head takes at once
_MOST, _FAINT = 63, 0.01  # rows below the root; one of a smaller chance is not looked at, even where rows are free
_PRIOR, _PRIOR_WEIGHT = 0.8, 4.0  # guesses that are right for one that is promised, and those it counts as
_ACCEPTED = 0.6  # share of guesses with a right one among them, before any was made


def check_chance(where: str, chance: float | None) -> None:
    """Raises ConfigError where ``min_chance`` is none."""
    if chance is not None and not 0 <= chance <= 1:
        raise ConfigError(f"{where}min_chance is {shown(chance)}; it is a probability, in [0, 1]")


class HeadSession(BatchedSession):
    """One sequence's hidden states, the head's own cache, and the records of its guesses.

    The head's cache holds row i once the hidden state of position i is known: the engine commits before it tells. What
    is told waits until the head is run anyway, but for a prompt's chunks, which go in as they come.

    Args:
        context: the sequence's.
        vocabulary: among which the head proposes.
        taps: hidden layers, in the order in which the head reads them.
        specs: what its layers cache.
        weights: how many a pass reads, for its price.
        rows: most rows of a pass behind the text.
        least: chance from which on a row is verified and extended, whatever it costs; None: where it pays.
    """

    def __init__(
        self,
        context: Context,
        vocabulary: DraftVocabulary,
        taps: Sequence[int],
        specs: Sequence[LayerSpec],
        weights: int,
        rows: int,
        least: float | None,
    ) -> None:
        self._context, self._vocabulary, self._taps, self._least = context, vocabulary, taps, least
        text = context.prompt_length + context.remaining
        self._device = specs[0].device
        cache = KVCache(specs, capacity=text, rows=max(rows, min(_CHUNK, text)))
        self._own = OwnCache(cache, device=self._device)
        params = context.sampling
        self._temperature, self._processors = params.temperature, params.processors()
        self._reads_prefix = params.repetition_penalty != 1
        sampled = params.temperature > 0 and params.acceptance != "typical"
        self._draws = sampled and params.acceptance == "reject"  # from q, or else with the target's own noise
        self._noise = vocabulary.noise(context.noise) if sampled and not self._draws else None
        costs, length = context.costs, context.prompt_length
        self._price = pass_price(weights, context.target, costs, length)
        self._most = min(_MOST, context.max_rows - 1)
        self._margin = Margin(costs, length, max(self._most, 1), _FAINT)
        self._steps = costs.steps(length, max(self._most, 1) + 1)
        self._right, self._promised = _PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        self._accepted, self._guesses = _ACCEPTED * _PRIOR_WEIGHT, _PRIOR_WEIGHT

    def observe(self, seen: Observation) -> None:
        self._learn(seen)
        parts = [seen.taps[layer] for layer in self._taps]
        if seen.draft is not None:
            parts = [device_copies.pick(part, seen.path) for part in parts]
        parts = [part.to(self._device) for part in parts]  # a target's layers may lie on several
        self._own.defer(parts[0] if len(parts) == 1 else torch.cat(parts, -1))
        prompt = len(self._context.tokens) == self._context.prompt_length
        if (prompt and seen.draft is None) or self._behind > _CHUNK // 2:
            self._catch_up()

    def _learn(self, seen: Observation) -> None:
        """Note what became of the latest guesses."""
        raise NotImplementedError

    def _absorb(self, features: torch.Tensor) -> None:
        """Have the head see the next rows, of which nothing is asked."""
        raise NotImplementedError

    @property
    def _behind(self) -> int:
        """Rows that wait, in a text whose latest step is over."""
        return self._context.cache.length - self._own.cache.length

    def _catch_up(self) -> None:
        """Have the head see all that waits but the last row, with which it will be asked."""
        waiting, most = self._own.catch_up(), self._own.cache.rows
        last = len(waiting) - 1
        for first in range(0, last, most):
            self._absorb(waiting[first : min(first + most, last)])
        self._own.defer(waiting[last:].clone())  # or all of it would be kept

    @property
    def _sure(self) -> float:
        """Guesses that were right in this text, for one that the head promised."""
        return self._right / self._promised

    def _note(self, promised: float, right: bool, accepted: bool) -> None:
        """Of a guess whose row was accepted: the chance of its likeliest token, and what came of it."""
        self._promised += promised
        self._right += right
        self._guesses += 1
        self._accepted += accepted

    def _place(self, depth: int) -> int:
        """Position of a token that is guessed behind a row of a depth."""
        return len(self._context.tokens) + depth

    def _scores(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """[N, d] guesses under the processors that the target's logits are under; ``paths``: tokens below the root."""
        if not self._processors:
            return logits
        scores = logits.float()
        device = scores.device
        if not self._reads_prefix:
            return processed(scores, torch.empty(1, 0, dtype=torch.long, device=device), self._processors)
        rows = []
        for own, path in zip(scores, paths, strict=True):
            ids = torch.tensor([[*self._context.tokens, *path]], device=device)
            whole = self._vocabulary.spread(own, -torch.inf)[None]  # by the tokens' ids
            rows.append(self._vocabulary.gather(processed(whole, ids, self._processors)[0]))
        return torch.stack(rows)

    def _ranked(self, scores: torch.Tensor, depth: int, count: int) -> list[Ranked]:
        """Of each guess [N, d] behind rows of a depth the likeliest tokens; none where the head says NaN."""
        place, found = self._place(depth), list[Any]()
        for row in scores:
            one = top_k(row, count, self._noise, place, self._temperature)
            if one is None:
                break
            found.append((one[0][0], one[1][0]))
        else:
            return [self._named(*one) for one in found]
        if self._noise is not None:
            scores = coupled(scores, self._noise.gumbel(place).to(scores.device), self._temperature)
        best = torch.softmax(scores, -1, dtype=torch.float32).topk(min(count, scores.shape[-1]))
        read = torch.stack((best.indices.double(), best.values.double())).tolist()
        return [self._named(*one) for one in zip(*read, strict=True)]

    def _named(self, numbers: Sequence[float], chances: Sequence[float]) -> Ranked:
        pairs = zip(numbers, chances, strict=True)
        return [(self._vocabulary.token(int(number)), chance) for number, chance in pairs if chance > 0 and number >= 0]

    def _draw(self, scores: torch.Tensor, row: int) -> tuple[int, float, torch.Tensor] | None:
        """A token drawn from one guess [d], the largest probability of any, and the distribution [V]; ``row``: of the
        draft, that it follows. None where the guess is no distribution.
        """
        q = torch.softmax(scores, -1, dtype=torch.float64)
        sums = q.cumsum(-1)
        # The first sum that is not below a positive number ends a step up: its token has probability.
        drawn = sums[-1:] * self._context.noise.uniform(len(self._context.tokens), Noise.DRAFT, row)
        number = torch.where(sums[-1] > 0, torch.searchsorted(sums, drawn)[0], -1)
        read = torch.stack((number.double(), q.max())).tolist()
        if read[0] < 0 or not read[1] > 0:
            return None
        return self._vocabulary.token(int(read[0])), read[1], self._vocabulary.spread(q, 0.0)

    def _count(self, reach: Sequence[float]) -> int:
        """How many rows are verified, of those with such chances, likeliest first."""
        if self._least is not None:
            return sum(chance >= self._least for chance in reach)
        return self._margin.size(reach)

    def _extending_pays(self, reach: Sequence[float]) -> bool:
        """Whether to run the head for rows that are reached with such chances."""
        if self._least is not None:
            return bool(reach)
        return sum(reach) * self._accepted / self._guesses > self._price

    def _drawing_pays(self, reached: float, rows: int, price: float) -> bool:
        """Whether one more drawn token is worth its row, and ``price``; by q and by what became of other draws."""
        if self._least is not None:
            return reached >= self._least
        return reached * self._accepted / self._guesses > price + self._steps[rows + 1] - self._steps[rows]
