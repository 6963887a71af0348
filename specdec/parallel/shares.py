"""A rank's share of a step: its slots, its output, and the scores that it gets from other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from specdec.errors import ConfigError
from specdec.parallel.split import split
from specdec.sampling.scores import Scores
from specdec.step.cache import KVCache
from specdec.target import TargetOutput

__all__ = ["GatheredScores", "SharedCache"]


class SharedCache(KVCache):
    """One text, of which this rank has run a part.

    Its ``length`` is the text's. What others' rows brought in the latest step is ``pending`` until the next one.

    Args:
        own: what this rank has run.
        rank, ranks: its number, and how many there are.
    """

    def __init__(self, own: KVCache, rank: int, ranks: int, *, capacity: int, rows: int) -> None:
        super().__init__([], capacity=capacity, rows=rows)
        self.own, self.rank = own, rank
        self.pending: list[int] = []
        self.text, self.known = 0, 0  # its checksum, up to there
        self._lags = [0] * ranks  # pending tokens of every rank
        self._shares: list[list[int]] | None = None
        self._tokens: list[int] = []

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def share(self, tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
        """Split a tree that is to be run next; the rows of each rank."""
        self._tokens = list(tokens)
        self._shares = split(parents, self._lags)
        return self._shares

    def commit(self, path: Sequence[int]) -> None:
        assert not self.own.moved, "what several processes judge no device has committed"
        if self._shares is None:  # all ranks ran all rows
            self.own.commit(path)
        else:
            kept = [sum(row in share for row in path) for share in map(set, self._shares)]  # an own part comes first
            place = {row: len(self.pending) + at for at, row in enumerate(self._shares[self.rank])}
            here = kept[self.rank]
            self.own.commit([*range(len(self.pending)), *(place[row] for row in path[:here])])
            self.pending = [self._tokens[row] for row in path[here:]]
            self._lags = [len(path) - count for count in kept]
            self._shares = None
        self.length += len(path)


class ShareOutput(TargetOutput):
    """The output of this rank's share; ``logits``, ``hidden`` and ``taps`` are of its own rows.

    Args:
        output: output of the rows that this rank ran.
        taps: taps of its share of the draft.

    Attributes:
        cache: the text's cache.
        shares: the rows of each rank.
        scored: the rows whose logits are needed.
    """

    def __init__(
        self,
        output: TargetOutput,
        taps: Mapping[int, torch.Tensor],
        *,
        cache: SharedCache,
        shares: list[list[int]],
        scored: list[int],
    ) -> None:
        super().__init__(output.logits, output.hidden, taps)
        self.cache, self.shares, self.scored = cache, shares, scored


class GatheredScores(Scores):
    """The likeliest tokens of a step's scored rows, from all ranks, without logits.

    Args:
        best: per scored row its likeliest tokens, best first.
        rows: the scored rows; None where row i has best[i].
    """

    def __init__(self, best: list[list[int]], rows: Sequence[int] | None) -> None:
        super().__init__(torch.empty(0), rows)
        self.best = best

    def of(self, row: int) -> torch.Tensor:
        raise ConfigError("logits are not exchanged under parallel='rows'; a drafter may read the likeliest tokens")

    def argmax(self, row: int) -> int:
        return self.top_k(1)[self.place(row)][0]

    def top_k(self, count: int) -> list[list[int]]:
        if any(len(tokens) < count for tokens in self.best[:1]):
            raise ConfigError(
                f"a drafter reads the {count} likeliest tokens of each row and its top_k is {len(self.best[0])}; "
                "set `top_k` to the number that it reads"
            )
        return [tokens[:count] for tokens in self.best]

    def weighed(self, count: int) -> tuple[list[list[int]], None]:
        return self.top_k(count), None

    def select(self, rows: Sequence[int], numbers: Sequence[int] | None) -> Scores:
        return GatheredScores([self.best[self.place(row)] for row in rows], numbers)
