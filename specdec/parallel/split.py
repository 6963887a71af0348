"""Split: which rows of a tree each rank runs.

A row needs the keys of its ancestors, so a share consists of the paths from the root to some leaves. Neighbouring
leaves share most of their paths, so each rank gets a range of consecutive leaves, chosen so that the largest share is
as small as possible. (Of lookahead's window each rank thus gets some columns, and the part of level 0 above them, as in
the paper.)
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["split"]


def split(parents: Sequence[int], lags: Sequence[int]) -> list[list[int]]:
    """The rows of each rank, ascending; all have the root.

    Args:
        parents: of the tree's rows, the root's being -1.
        lags: for each rank, the rows that it has to run besides.

    Example: ``split((-1, 0, 1, 0, 3), (0, 0))`` is ``[[0, 1, 2], [0, 3, 4]]``; a chain stays with rank 0.
    """
    leaves, depths = _leaves(parents)
    low, high = 1 + max(lags), 1 + max(lags) + len(parents)
    while low < high:  # the least load at which all leaves find a rank
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(leaves, depths, lags, middle) is not None else (middle + 1, high)
    owners = _fill(leaves, depths, lags, low)
    assert owners is not None  # a rank alone can hold the whole tree
    shares: list[set[int]] = [{0} for _ in lags]
    for (leaf, _), rank in zip(leaves, owners, strict=True):
        row = leaf
        while row not in shares[rank]:
            shares[rank].add(row)
            row = parents[row]
    return [sorted(share) for share in shares]


def _leaves(parents: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """The leaves in the tree's order, each with the rows that it has and the leaf before it has not; all depths."""
    below: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for row in range(1, len(parents)):
        below[parents[row]].append(row)
        depths[row] = depths[parents[row]] + 1
    leaves, stack, fresh = list[tuple[int, int]](), [0], -1  # the root is everybody's
    while stack:
        row = stack.pop()
        fresh += 1
        if below[row]:
            stack.extend(reversed(below[row]))
        else:
            leaves.append((row, fresh))
            fresh = 0
    return leaves, depths


def _fill(leaves: Sequence[tuple[int, int]], depths: Sequence[int], lags: Sequence[int], most: int) -> list[int] | None:
    """The rank of each leaf where no rank runs more than ``most`` rows; None where they do not fit."""
    rank, load = 0, lags[0] + 1
    owners: list[int] = []
    for leaf, fresh in leaves:
        cost = fresh
        while load + cost > most:
            rank += 1
            if rank == len(lags):
                return None
            load, cost = lags[rank] + 1, depths[leaf]
        load += cost
        owners.append(rank)
    return owners
