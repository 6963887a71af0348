"""Trees of rank paths: which guesses a tree should hold, given how often each rank proves right at each depth."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from specdec.costs.curve import CostCurve

__all__ = ["Grown", "Margin", "grow", "paying"]


class Grown(NamedTuple):
    """A node: its parent (0 is the root, node i is i + 1), its rank, its depth, the chance that it is right."""

    parent: int
    rank: int
    depth: int
    worth: float


class Margin:
    """Which nodes of a tree pay, where a token is worth a plain step.

    Args:
        costs: the target's.
        length: tokens of the text.
        most: nodes of a tree.
        faint: what a node must be worth even where rows are free.

    Attributes:
        least: of a tree of 0, 1, ... nodes, what the next one must be worth, or no more of them will pay: none behind
            it is worth more, and so many will cost at least that much each.
    """

    def __init__(self, costs: CostCurve, length: int, most: int, faint: float) -> None:
        self._steps = steps = costs.steps(length, most + 1)[1:]  # of 0, 1, ... nodes
        self.least = [math.inf]
        hull = [most]  # corners of the largest convex curve that is nowhere above the steps of more nodes, nearest last

        def each(nodes: int, more: int) -> float:
            return (steps[more] - steps[nodes]) / (more - nodes)

        for nodes in range(most - 1, -1, -1):
            while len(hull) > 1 and each(nodes, hull[-1]) >= each(nodes, hull[-2]):
                hull.pop()
            self.least.append(max(each(nodes, hull[-1]), faint))
            hull.append(nodes)
        self.least.reverse()

    def size(self, worths: Sequence[float]) -> int:
        """How many nodes, likeliest first, bring the most tokens over what their rows cost."""
        nets = [tokens - step for tokens, step in zip(accumulate(worths, initial=0.0), self._steps, strict=False)]
        return nets.index(max(nets))


def grow(
    rates: Sequence[Sequence[float]], most: int, least: Sequence[float] | None = None, share: float = 1.0
) -> list[Grown]:
    """The ``most`` nodes that are likeliest to be right, likeliest first, so that parents come before children.

    No more of them than the first that is worth less than :attr:`Margin.least` says.

    ``rates[d][r]`` is the chance that the guess of rank r is right d + 1 tokens below the root where its parent is, and
    falls with the rank; of each a ``share`` is believed, and at most 1. A node's worth is the product along its path.

    Example: ``grow([[.5, .2]] * 6, 3)`` holds (parent 0, rank 0), (1, 0) and (0, 1): the best guess, the best after
    it, the second best.
    """
    nodes: list[Grown] = []
    deepest, count, take, keep = len(rates), 0, heapq.heappop, heapq.heappush
    # A guess is looked at when the one of the rank before is a node: (-worth, parent, rank, depth, the parent's worth).
    ahead = [(-min(share * rates[0][0], 1.0), 0, 0, 1, 1.0)]
    while ahead and count < most:
        worth, parent, rank, depth, above = take(ahead)
        if least is not None and not -worth >= least[count]:  # NaN is worth nothing
            break
        nodes.append(Grown(parent, rank, depth, -worth))
        own, rank, count = rates[depth - 1], rank + 1, count + 1
        if rank < len(own):
            keep(ahead, (-above * min(share * own[rank], 1.0), parent, rank, depth, above))
        if depth < deepest:
            keep(ahead, (worth * min(share * rates[depth][0], 1.0), count, 0, depth + 1, -worth))
    return nodes


def paying(nodes: Sequence[Grown], costs: CostCurve, length: int) -> int:
    """How many of the first nodes are expected to bring the most tokens for their time after ``length`` tokens."""
    return costs.paying([node.worth for node in nodes], length)
