"""Trees of rank paths: which guesses a tree should hold, given how often each rank proves right at each depth."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from specdec.cost import CostCurve

__all__ = ["Grown", "grow", "paying"]


class Grown(NamedTuple):
    """A node: its parent (0 is the root, node i is i + 1), its rank, its depth, the chance that it is right."""

    parent: int
    rank: int
    depth: int
    worth: float


def grow(rates: Sequence[Sequence[float]], most: int, least: float = 0.0) -> list[Grown]:
    """The ``most`` nodes that are likeliest to be right, likeliest first, so that parents come before children.

    None is worth less than ``least``.

    ``rates[d][r]`` is the chance that the guess of rank r is right d + 1 tokens below the root where its parent is, and
    falls with the rank; a node's worth is the product along its path.

    Example: ``grow([[.5, .2]] * 6, 3)`` holds (parent 0, rank 0), (1, 0) and (0, 1): the best guess, the best after
    it, the second best.
    """
    nodes: list[Grown] = []
    # A guess is looked at when the one of the rank before is a node: (-worth, parent, rank, depth, the parent's worth).
    ahead = [(-rates[0][0], 0, 0, 1, 1.0)]
    while ahead and len(nodes) < most:
        worth, parent, rank, depth, above = heapq.heappop(ahead)
        if -worth < least:
            break
        nodes.append(Grown(parent, rank, depth, -worth))
        own = rates[depth - 1]
        if rank + 1 < len(own):
            heapq.heappush(ahead, (-above * own[rank + 1], parent, rank + 1, depth, above))
        if depth < len(rates):
            heapq.heappush(ahead, (worth * rates[depth][0], len(nodes), 0, depth + 1, -worth))
    return nodes


def paying(nodes: Sequence[Grown], costs: CostCurve, length: int) -> int:
    """How many of the first nodes are expected to bring the most tokens for their time after ``length`` tokens."""
    return costs.paying([node.worth for node in nodes], length)
