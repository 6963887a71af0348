"""Trees grow by worth, to the size that pays."""

from __future__ import annotations

import itertools

import pytest

from drafters.tree import grow, paying
from specdec.cost import CostCurve


def test_trees_grow_by_worth() -> None:
    rates = [[0.6, 0.2, 0.1], [0.5, 0.3]]
    nodes = grow(rates, 99)
    paths: list[tuple[int, ...]] = [()]
    for node in nodes:
        paths.append((*paths[node.parent], node.rank))
        assert node.depth == len(paths[-1])
    every = [path for size in (1, 2) for path in itertools.product(range(3), range(2)) for path in [path[:size]]]
    assert sorted(paths[1:]) == sorted(set(every))
    worth = {path: rates[0][path[0]] * (rates[1][path[1]] if len(path) > 1 else 1.0) for path in paths[1:]}
    assert [node.worth for node in nodes] == pytest.approx(sorted(worth.values(), reverse=True))
    assert grow(rates, 3) == nodes[:3]
    assert grow(rates, 99, nodes[4].worth) == [node for node in nodes if node.worth >= nodes[4].worth]


def test_sizes_that_pay() -> None:
    nodes = grow([[0.5, 0.2], [0.4, 0.1]], 99)  # 0.5, 0.2, 0.2, 0.08, 0.05, 0.02
    for slope, size in ((0.0, 6), (0.3, 1), (0.1, 3)):
        costs = CostCurve(machine={}, rows=[1, 101], lengths=[1], seconds=[[1.0, 1.0 + 100 * slope]])
        assert paying(nodes, costs, 100) == size
