"""Shares of a tree: whole paths, every row somewhere, and no rank with much more than the others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from specdec.parallel.split import split


def tree(rng: random.Random, rows: int) -> list[int]:
    return [-1, *(rng.randrange(max(0, row - 4), row) for row in range(1, rows))]


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_paths_and_cover_the_tree(seed: int) -> None:
    rng = random.Random(seed)
    parents = tree(rng, rng.randint(1, 40))
    lags = [rng.randint(0, 6) for _ in range(rng.randint(1, 4))]
    shares = split(parents, lags)
    assert len(shares) == len(lags)
    assert set().union(*shares) == set(range(len(parents)))
    for share in shares:
        assert share == sorted(set(share))
        assert 0 in share
        assert all(parents[row] in share for row in share if row)


def heaviest(parents: Sequence[int], lags: Sequence[int], leaves: Sequence[int], cuts: Sequence[int]) -> int:
    """Rows of the rank with the most, where stretches of the leaves end at ``cuts``."""
    loads = []
    for lag, first, last in zip(lags, (0, *cuts), (*cuts, len(leaves)), strict=True):
        share = {0}
        for row in leaves[first:last]:
            while row not in share:
                share.add(row)
                row = parents[row]
        loads.append(lag + len(share))
    return max(loads)


def in_order(parents: Sequence[int], row: int = 0) -> list[int]:
    below = [child for child in range(len(parents)) if parents[child] == row]
    return [leaf for child in below for leaf in in_order(parents, child)] if below else [row]


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_share_is_the_shortest_possible(seed: int) -> None:
    rng = random.Random(seed)
    parents, lags = tree(rng, rng.randint(2, 16)), [rng.randint(0, 4) for _ in range(rng.randint(1, 3))]
    leaves = in_order(parents)
    ways = itertools.combinations_with_replacement(range(len(leaves) + 1), len(lags) - 1)
    best = min(heaviest(parents, lags, leaves, cuts) for cuts in ways)
    assert max(lag + len(share) for lag, share in zip(lags, split(parents, lags), strict=True)) == best


def window(width: int, levels: int, guesses: int, length: int) -> list[int]:
    """Lookahead's tree."""
    parents = [-1, *range(width - 1)]
    above = list(range(width))
    for _ in range(levels - 1):
        parents += above
        above = list(range(len(parents) - width, len(parents)))
    for _ in range(guesses):
        parents += [0, *range(len(parents), len(parents) + length - 1)]
    return parents


def test_lookahead_s_window_is_halved() -> None:
    parents = window(15, 4, 15, 4)
    assert len(parents) == 120
    assert [len(share) for share in split(parents, (0, 0))] == [60, 61]
    assert [len(share) for share in split(parents, (0, 9))] == [64, 57]  # who lags gets less
    assert max(len(share) for share in split(parents, [0] * 8)) == 21


def test_a_chain_stays_together() -> None:
    assert split((-1, 0, 1, 2), (0, 0)) == [[0, 1, 2, 3], [0]]
    assert split((-1, 0, 1, 2), (5, 0)) == [[0], [0, 1, 2, 3]]
