"""Drafts that stay on a device until they are verified: no guess is read, so the host never waits for one.

The shape of such a draft is settled before it is computed (:mod:`drafters.heads.settled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from drafters.heads.session import HeadSession
from drafters.heads.settled import Settled, settle
from drafters.shared.vocabulary import coupled
from specdec.drafter import Context, Observation
from specdec.sampling.noise import Noise
from specdec.step import device_copies
from specdec.step.forward_passes import Passes
from specdec.step.tree import Draft, Hints

__all__ = ["UnreadSession", "rows_at"]

_LEAST = 1e-30  # least probability under a q


class UnreadSession(HeadSession):
    """A session whose rounds stay on a device where they can.

    They do not with ``min_chance``, as the head's own chances are compared with it, and with a repetition penalty,
    which reads each row's tokens.
    """

    def __init__(self, context: Context, *arguments: Any) -> None:
        super().__init__(context, *arguments)
        self._stays = context.target.launches and not self._least and not self._reads_prefix
        self._drawn_by = self._vocabulary.noise(context.noise)
        self._root = torch.empty(0)  # [1] the root's token on the device, once the root has run

    def _grow(self, most: int, deepest: int) -> Passes[Draft]:
        if not self._stays:
            return (yield from super()._grow(most, deepest))
        shape = self._settle(most, min(deepest, most)) if self._at_once else None
        yield from self._begin(deepest if shape is None else len(shape.levels))
        if shape is None:  # settled while a device runs the root
            shape = self._settle(most, min(deepest, most))
        tokens, q, first = [self._root], dict[int, torch.Tensor](), 0
        for depth, level in enumerate(shape.levels):
            wanted = rows_at(tokens[-1], [row - first for row in level])
            behind = yield from self._behind(shape, level, wanted)
            values, drawn_from = self._values(behind.logits.expand(len(level), -1), depth, level)
            if drawn_from is not None:
                q |= {row: self._vocabulary.spread(own, 0.0) for row, own in zip(level, drawn_from, strict=True)}
            counts = [len(shape.children(row)) for row in level]
            best = values.topk(max(counts)).indices
            numbers = [own[:count] for own, count in zip(best, counts, strict=True)]
            tokens.append(self._vocabulary.tokens_at(numbers[0] if len(numbers) == 1 else torch.cat(numbers)))
            first = shape.children(level[0])[0]
        self._passes = 1 if self._at_once else len(shape.levels)
        hints = Hints(chances=shape.chances, cost=self._cost)
        self._grown, shape.draft = shape, Draft((), shape.parents, q=q, hints=hints, on_device=torch.cat(tokens))
        return shape.draft

    def observe(self, seen: Observation) -> None:
        if isinstance(self._grown, Settled) and self._grown.draft is not None:  # which the engine has read by now
            self._grown.tokens = [*self._grown.draft.on_host().tokens]
        super().observe(seen)

    def _settle(self, most: int, deepest: int) -> Settled:
        """The shape of a draft, by what became of tokens of each rank in this text."""
        prices, length, anyhow = self._prices, self._length, self._least is not None

        def gain(reach: Sequence[float], levels: int) -> float:
            return prices.gain(sum(reach), length, 1 + len(reach), drafting=self._level_price * (levels - 1))

        return settle(
            self._ranks.shares[: min(most, self._vocabulary.size)],
            most,
            deepest,
            width=self._width,
            least=None if anyhow else self._least_reach,
            gain=None if anyhow else gain,
            keep=self._count,
        )

    def _values(
        self, logits: torch.Tensor, depth: int, rows: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Values [N, d], the largest of which are the guesses behind each row of a depth; and q [N, d], if drawn.

        Under ``reject`` the largest are draws without replacement, in order (Kool et al. 2019). The number of draws is
        settled, so every token has a probability.
        """
        scores, size = self._scores(logits, ()), logits.shape[-1]
        if self._draws:
            q = torch.softmax(scores, -1, dtype=torch.float64).nan_to_num(1 / size).clamp(min=_LEAST)
            q = q / q.sum(-1, keepdim=True)
            position = len(self._context.tokens)
            noise = torch.stack([self._drawn_by.gumbel(position, Noise.DRAFT, row) for row in rows])
            return q.log() + noise.to(q.device), q
        if self._noise is not None:
            noise_here = self._noise.gumbel(self._place(depth)).to(scores.device)
            scores = coupled(scores, noise_here, self._temperature)
        return scores, None


def rows_at(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Some rows of a tensor [N, ...]; those beside each other without a copy."""
    first, last = places[0], places[0] + len(places)
    if [*places] == [*range(first, last)]:
        return values[first:last]
    return device_copies.pick(values, places)
