"""A rank's share of a text: its slots."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.parallel.split import split
from specdec.step.cache import KVCache

__all__ = ["SharedCache"]


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
