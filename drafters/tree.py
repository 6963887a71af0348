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

    ``rates[d][r]`` is the chance that the guess of rank r is right d + 1 tokens below the root where its parent is; a
    node's worth is the product along its path.

    Example: ``grow([[.5, .2]] * 6, 3)`` holds (parent 0, rank 0), (1, 0) and (0, 1): the best guess, the best after
    it, the second best.
    """
    nodes: list[Grown] = []
    ahead: list[tuple[float, int, int, int, int]] = []  # (-worth, order of discovery, parent, rank, depth)
    found = 0

    def push(parent: int, depth: int, worth: float) -> None:
        nonlocal found
        for rank, rate in enumerate(rates[depth - 1]):
            if worth * rate >= least:
                heapq.heappush(ahead, (-worth * rate, found, parent, rank, depth))
                found += 1

    push(0, 1, 1.0)
    while ahead and len(nodes) < most:
        worth, _, parent, rank, depth = heapq.heappop(ahead)
        nodes.append(Grown(parent, rank, depth, -worth))
        if depth < len(rates):
            push(len(nodes), depth + 1, -worth)
    return nodes


def paying(nodes: Sequence[Grown], costs: CostCurve, length: int) -> int:
    """How many of the first nodes are expected to bring the most tokens for their time after ``length`` tokens."""
    return costs.paying([node.worth for node in nodes], length)
