"""Drawing a tree for ``reject``: the children of a row are drawn without replacement from the head's distribution q.

The rule is lossless for such a tree (:mod:`specdec.sampling.verify`) if each child was drawn from what its elder
siblings leave of q, and if every token that was drawn is verified. So the number of a row's children is decided before
they are drawn. It may depend on everything that was drawn before, the row's own token included.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import torch

__all__ = ["drawn", "planned"]


def planned(
    reach: Sequence[float],
    chances: Sequence[Sequence[float]],
    usual: Sequence[float],
    *,
    levels: int,
    rows: int,
    pays: Callable[[float, int], bool],
) -> list[int]:
    """The number of children to draw behind each row of a level.

    The rest of the tree is planned by rank, likeliest rows first; the plan's next level is drawn. So a row is not spent
    on a sibling where a row further down is likelier.

    Args:
        reach: per row of the level, the chance that it is accepted.
        chances: per row, its children's chances, the largest first; empty for a row that has none.
        usual: chances of the children of rows that are not drawn yet.
        levels: number of levels that the tree may still have.
        rows: rows of the tree so far, the root not counted.
        pays: whether the next row pays, given its reach and the number of rows before it.
    """
    counts = [0] * len(reach)
    # The next child of each row of the plan: (-its reach, row of the level above all, rank, its depth, siblings, and
    # their parent's reach).
    ahead = [
        (-own * siblings[0], place, 0, 1, siblings, own)
        for place, (own, siblings) in enumerate(zip(reach, chances, strict=True))
        if siblings
    ]
    heapq.heapify(ahead)
    while ahead and pays(-ahead[0][0], rows):
        own, place, rank, depth, siblings, parent = heapq.heappop(ahead)
        rows += 1
        counts[place] += depth == 1
        if rank + 1 < len(siblings):
            heapq.heappush(ahead, (-parent * siblings[rank + 1], place, rank + 1, depth, siblings, parent))
        if depth < levels:
            heapq.heappush(ahead, (own * usual[0], place, 0, depth + 1, usual, -own))
    return counts


def drawn(q: torch.Tensor, uniforms: Sequence[Sequence[float]]) -> list[list[int]]:
    """Draw without replacement from each row of ``q`` [N, d], once for each of the row's ``uniforms`` in (0, 1).

    Returns:
        The places that were drawn; fewer where the other places have no probability.
    """
    places, left = list[torch.Tensor](), q
    if not any(uniforms):
        return [[] for _ in uniforms]
    for turn in range(max(map(len, uniforms))):
        numbers = [own[turn] if turn < len(own) else 0.5 for own in uniforms]
        sums = left.cumsum(-1)
        # searchsorted finds the first sum that reaches the drawn number, so its place has a positive probability.
        wanted = sums[:, -1:] * torch.tensor(numbers, dtype=q.dtype, device=q.device)[:, None]
        found = torch.where(sums[:, -1:] > 0, torch.searchsorted(sums, wanted), -1)
        places.append(found)
        left = left.scatter(1, found.clamp(min=0), 0.0)
    read = torch.cat(places, 1).tolist()
    return [[place for place in own[: len(each)] if place >= 0] for own, each in zip(read, uniforms, strict=True)]
