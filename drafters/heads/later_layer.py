"""A multi-token-prediction layer behind the first: its cache, its inputs, and its rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.heads.growth import Growth
from specdec.step.cache import KVCache

__all__ = ["LaterLayer", "above_in"]


class LaterLayer:
    """A layer behind the first: its cache, its inputs from the layer before, and the rows of this step's tree.

    A row of text is named by its position in the text. The cache lacks the positions that were missed.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._missing = 0
        self._first, self._given = 0, list[torch.Tensor]()
        self.begin(0)

    @property
    def next(self) -> int:
        """The position of the next row of the cache; valid between two steps."""
        return self.cache.length + self._missing

    @property
    def last(self) -> int:
        """The end of the text for which the layer before has given inputs."""
        return self._first + sum(map(len, self._given))

    def miss(self, position: int) -> None:
        """Go on at a position of the text, without what the cache lacks before it."""
        self._missing = position - self.cache.length
        self._first, self._given = position, []

    def put(self, first: int, states: torch.Tensor) -> None:
        """Keep inputs [T, D] from position ``first`` on; they replace earlier ones from there on."""
        if self._given and first < self.last:
            self._given = [torch.cat(self._given)[: first - self._first]]
        if first == self.last or not self._given:
            self._first = self._first if self._given else first
            self._given.append(states)

    def states(self, first: int, last: int) -> torch.Tensor:
        """[last - first, D] the inputs of [first, last); inputs of committed rows before them are dropped."""
        whole = self._given[0] if len(self._given) == 1 else torch.cat(self._given)
        keep = max(0, min(first, self.next) - self._first)
        self._given, self._first = [whole[keep:]], self._first + keep
        return self._given[0][first - self._first : last - self._first]

    def begin(self, text: int) -> None:
        """Begin a tree behind ``text`` rows of text."""
        self.parents, self.depths = [*range(-1, text - 1)], [*range(text)]
        self._places = {0: text - 1}

    def grow(self, parents: Sequence[int], nodes: Sequence[int]) -> None:
        """Add nodes below their parents."""
        for node in nodes:
            above = self._places[parents[node]]
            self._places[node] = len(self.parents)
            self.parents.append(above)
            self.depths.append(self.depths[above] + 1)

    def rebase(self, text: int) -> None:
        """Drop the first ``text`` rows from the tree, as they are committed."""
        self.parents = [max(above - text, -1) for above in self.parents[text:]]
        self.depths = [depth - text for depth in self.depths[text:]]
        self._places = {node: place - text for node, place in self._places.items()}


def above_in(grown: Growth, node: int) -> list[int]:
    """A node and its ancestors below the root."""
    found = list[int]()
    while node:
        found.append(node)
        node = grown.parents[node]
    return found
