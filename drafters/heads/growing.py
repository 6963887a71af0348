"""Growing drafts from a head's guesses, level by level as far as that pays, with a record of their accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import count
from operator import add
from typing import Any

import torch

from drafters.heads.drawing import drawn, planned
from drafters.heads.growth import Growth
from drafters.heads.native_growth import Grown
from drafters.shared.ranks import Ranks
from drafters.shared.scored_tree import Guesses
from drafters.shared.vocabulary import DraftVocabulary, coupled, processed, top_k
from specdec.costs.curve import pass_price
from specdec.costs.prices import Prices
from specdec.drafter import BatchedSession, Context, Observation
from specdec.sampling.noise import Noise
from specdec.step.forward_passes import Passes
from specdec.step.tree import Draft, Hints

__all__ = ["WIDTH", "Behind", "GrowingSession", "Tokens"]

Tokens = Sequence[int] | torch.Tensor
"""Of a level's nodes; where rounds stay on a device, int64 [N] there."""

WIDTH = 8
"""Most rows of a level that are extended."""

_MOST, _FAINT = 63, 0.01  # most rows below the root; rows of a smaller chance are skipped even where rows are free
_PRIOR, _PRIOR_WEIGHT = 0.8, 4.0  # prior: the share of promised guesses that are right, and its weight in guesses
_ACCEPTED = 0.6  # prior: the share of nodes with an accepted child


@dataclass(frozen=True, slots=True, eq=False)
class Behind:
    """A head's guesses behind some nodes.

    Attributes:
        logits: [N, d], or [1, d] where they are the same behind all nodes.
        accepted: [N] chance that each node's likeliest child is accepted, where the head estimates it; else None.
    """

    logits: torch.Tensor
    accepted: Sequence[float] | None = None


class GrowingSession(BatchedSession):
    """One sequence's guesses. Subclasses run the head behind the nodes of a level.

    Args:
        context: the sequence's context.
        vocabulary: the draft vocabulary.
        options: the drafter's options; ``rows``, ``branch`` and ``min_chance`` are read.
        depth: most tokens of a path.
        weights: number of weights that a pass reads, for its price.
        at_once: whether one pass gives all depths.
    """

    _width = WIDTH

    def __init__(
        self,
        context: Context,
        vocabulary: DraftVocabulary,
        options: Any,
        *,
        depth: int,
        weights: float,
        at_once: bool = False,
    ) -> None:
        self._context, self._vocabulary = context, vocabulary
        # Chance from which a row is verified and extended at any cost; None: where it pays.
        self._least: float | None = options.min_chance
        self._branch, self._rows = options.branch, options.rows or _MOST
        self._deepest, self._at_once = depth, at_once
        self._grown: Growth | Grown | None = None
        self._stays = False  # whether rounds stay on a device; their shapes are settled beforehand
        self._passes = 0
        params = context.sampling
        self._temperature, self._processors = params.temperature, params.processors()
        self._reads_prefix = params.repetition_penalty != 1
        # Whether processors only divide by the temperature.
        self._plain = not self._reads_prefix and len(self._processors) <= (params.temperature not in (0, 1))
        sampled = params.temperature > 0 and params.acceptance != "typical"
        self._draws = sampled and params.acceptance == "reject"  # from q, not by the target's noise
        self._noise = vocabulary.noise(context.noise) if sampled and not self._draws else None
        costs, length = context.costs, context.prompt_length
        self._price = pass_price(weights, context.target, costs, length)
        self._most = min(self._rows, context.max_rows - 1)
        self._prices, self._length = Prices(costs), length
        self._least_reach = self._prices.least_reach(length, max(self._most, 1), _FAINT)
        self._right, self._promised = _PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        self._accepted, self._guesses = _ACCEPTED * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        # Of children that are drawn, or whose number is settled.
        self._ranks = Ranks(min(self._branch, max(self._most, 1)), _ACCEPTED, _PRIOR_WEIGHT)

    def _ready(self) -> bool:
        """Begin a round; returns whether the head has anything to guess from."""
        raise NotImplementedError

    def passes(self, row_budget: int) -> Passes[Draft]:
        context = self._context
        most, deepest = min(row_budget - 1, self._most), min(self._deepest, context.remaining - 1)
        if not self._ready() or most < 1 or deepest < 1:
            return Draft.chain([context.root])
        return (yield from self._grow(most, deepest))

    def _grow(self, most: int, deepest: int) -> Passes[Draft]:
        """A draft of at most ``most`` rows below the root, and ``deepest`` tokens deep."""
        yield from self._begin(deepest)
        self._grown = grown = Growth(self._context.root)
        self._passes = 1
        grow = self._drawn if self._draws else self._tree
        return (yield from grow(grown, most, min(deepest, most)))

    def _tree(self, grown: Growth, most: int, deepest: int) -> Passes[Draft]:
        """Grow a tree level by level, as far as that pays; the draft has the likeliest rows."""
        level = [0]
        while True:
            depth, behind = grown.depths[level[0]], (yield from self._guessed(grown, level))
            logits = behind.logits.expand(len(level), -1) if self._reads_prefix else behind.logits
            scores = self._scores(logits, [grown.path(node) for node in level])
            guesses = self._ranked(scores, depth, min(self._branch, most))
            for place, node in enumerate(level):
                ranked = guesses[place if len(guesses) > 1 else 0]
                if behind.accepted is not None:
                    ranked = _by_acceptance(ranked, behind.accepted[place if len(behind.accepted) > 1 else 0])
                grown.promises[node] = ranked[0][1] if ranked else 0.0
                grown.extend(node, ranked, self._sure)
            best = grown.best(most)
            kept = best[: self._count([grown.reach[node] for node in best])]
            level = [node for node in kept if grown.depths[node] == depth + 1][: self._width]
            if depth + 1 == deepest or not self._extending_pays([grown.reach[node] for node in level]):
                break
            self._passes += not self._at_once
        rows = {0: 0, **{node: row for row, node in enumerate(kept, 1)}}
        nodes = [0, *kept]
        parents = [-1, *(rows[grown.parents[node]] for node in kept)]
        chances = [grown.chances[node] for node in nodes]
        return Draft([grown.tokens[node] for node in nodes], parents, hints=Hints(chances=chances, cost=self._cost))

    def _drawn(self, grown: Growth, most: int, deepest: int) -> Passes[Draft]:
        """Draw a tree level by level, as far as that pays; all rows that are drawn are verified."""
        q, level, turns = dict[int, torch.Tensor](), [0], count()
        while True:
            depth, behind = grown.depths[level[0]], (yield from self._guessed(grown, level))
            shares, chances = self._drawable(behind, [grown.path(node) for node in level])
            reach, usual, rows = [grown.reach[node] for node in level], self._ranks.shares, len(grown) - 1
            pays = partial(self._row_pays, most=most)
            counts = planned(reach, chances, usual, levels=deepest - depth, rows=rows, pays=pays)
            for place, below in enumerate(self._draw(shares, counts, turns)):
                if below:
                    q[level[place]] = self._vocabulary.spread(shares[place], 0.0)
                    grown.extend(level[place], [*zip(below, chances[place], strict=False)], 1.0)
            level = sorted(range(rows + 1, len(grown)), key=grown.reach.__getitem__, reverse=True)[: self._width]
            level = [node for node in level if pays(grown.reach[node] * usual[0], len(grown) - 1)]
            if depth + 1 == deepest or not self._drawing_pays([grown.reach[node] for node in level], len(grown) - 1):
                break
            self._passes += not self._at_once
        return Draft(grown.tokens, grown.parents, q=q, hints=Hints(cost=self._cost))

    def _drawable(self, behind: Behind, paths: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[list[float]]]:
        """The distributions [N, d] behind N rows, and per row the chances of its children; none where there is NaN."""
        logits = behind.logits.expand(len(paths), -1) if self._reads_prefix else behind.logits
        shares = torch.softmax(self._scores(logits, paths), -1, dtype=torch.float64)
        likely = shares.amax(-1).tolist() if behind.accepted is None else [*behind.accepted]
        chances = [self._ranks.behind(chance) if chance > 0 else [] for chance in likely]
        return shares.expand(len(paths), -1), chances * (len(paths) // len(chances))

    @property
    def _cost(self) -> float:
        return self._passes * self._price

    def _learn(self, seen: Observation) -> None:
        """Record whether the latest guesses were right."""
        grown, self._grown = self._grown, None
        if grown is None or seen.draft is None:
            return
        node = 0
        for token in seen.tokens:
            if not (children := grown.children(node)):
                break
            right = next((child for child in children if grown.tokens[child] == token), None)
            promised = grown.promised(node)
            self._promised += promised
            self._right += promised > 0 and right == children[0]
            self._guesses += 1
            self._accepted += right is not None
            if self._draws or self._stays:
                self._ranks.learn([grown.tokens[child] for child in children], token)
            if right is None:
                break
            node = right

    def _begin(self, deepest: int) -> Passes[None]:
        """Run the head for waiting rows; it then guesses what follows the root, or all depths up to ``deepest``."""
        raise NotImplementedError

    def _guessed(self, grown: Growth, level: Sequence[int]) -> Passes[Behind]:
        return (yield from self._behind(grown, level, [grown.tokens[node] for node in level]))

    def _behind(self, tree: Growth, level: Sequence[int], tokens: Tokens) -> Passes[Behind]:
        """Guesses behind nodes of one depth, which hold these tokens."""
        raise NotImplementedError

    @property
    def _sure(self) -> float:
        """The ratio of right guesses in this text to the chances that the head gave them."""
        return self._right / self._promised

    def _place(self, depth: int) -> int:
        """The position of a token that is guessed behind a row of this depth."""
        return len(self._context.tokens) + depth

    def _scores(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """[N, d] guesses after the processors of the target's logits; ``paths``: tokens below the root."""
        if not self._processors:
            return logits
        scores = logits.float()
        device = scores.device
        if not self._reads_prefix:
            return processed(scores, torch.empty(1, 0, dtype=torch.long, device=device), self._processors)
        rows = []
        for own, path in zip(scores, paths, strict=True):
            ids = torch.tensor([[*self._context.tokens, *path]], device=device)
            whole = self._vocabulary.spread(own, -torch.inf)[None]  # indexed by token id
            rows.append(self._vocabulary.gather(processed(whole, ids, self._processors)[0]))
        return torch.stack(rows)

    def _ranked(self, scores: torch.Tensor, depth: int, count: int) -> list[Guesses]:
        """For each row of [N, d] guesses at a depth, the likeliest tokens; empty where the head gives NaN."""
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

    def _named(self, numbers: Sequence[float], chances: Sequence[float]) -> Guesses:
        pairs = zip(numbers, chances, strict=True)
        return [(self._vocabulary.token(int(number)), chance) for number, chance in pairs if chance > 0 and number >= 0]

    def _draw(self, shares: torch.Tensor, counts: Sequence[int], turns: Iterator[int]) -> list[list[int]]:
        """Tokens drawn behind each row of ``shares`` [N, d], up to ``counts`` of them; each draw takes a turn."""
        noise, position = self._context.noise, len(self._context.tokens)
        uniforms = [[noise.uniform(position, Noise.DRAFT, next(turns)) for _ in range(size)] for size in counts]
        return [[self._vocabulary.token(number) for number in own] for own in drawn(shares, uniforms)]

    def _count(self, reach: Sequence[float]) -> int:
        """The number of rows to verify, given the chances ``reach`` of all rows, the largest first."""
        if self._least is not None:
            return sum(chance >= self._least for chance in reach)
        return self._prices.keep(reach, self._length)

    def _extending_pays(self, reach: Sequence[float]) -> bool:
        """Whether a pass of the head pays for rows that are reached with these chances."""
        if self._least is not None:
            return bool(reach)
        # Added one by one, as the native library does; from Python 3.12 on, sum() does otherwise.
        tokens = reduce(add, reach, 0.0) * self._accepted / self._guesses
        return self._prices.gain(tokens, self._length, 1, drafting=self._level_price) > 0

    @property
    def _level_price(self) -> float:
        return 0.0 if self._at_once else self._price

    def _row_pays(self, reach: float, rows: int, *, most: int) -> bool:
        """Whether one more row is drawn behind ``rows`` others; the first is, as nothing would be learned without."""
        if rows == 0 or rows >= most:
            return rows < most
        return reach >= (self._least_reach[rows] if self._least is None else self._least)

    def _drawing_pays(self, reach: Sequence[float], rows: int) -> bool:
        """Whether one more level pays, behind rows that are reached with these chances."""
        if self._least is not None:
            return bool(reach)
        gains = [own * self._ranks.shares[0] - self._least_reach[rows] for own in reach]
        return self._prices.gain(sum(gains), self._length, 1, drafting=self._level_price) > 0


def _by_acceptance(ranked: Guesses, accepted: float) -> Guesses:
    """The same tokens with the first one's chance set to ``accepted``; the others are scaled with it."""
    if not ranked:
        return ranked
    scale = accepted / ranked[0][1]
    return [(token, scale * chance) for token, chance in ranked]
