"""Trees grow by worth, to the size that pays."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from drafters.shared.scored_tree import Margin, grow, paying
from specdec.costs.curve import CostCurve


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
    assert grow(rates, 99, [nodes[4].worth] * 99) == [node for node in nodes if node.worth >= nodes[4].worth]


def test_no_tree_grows_of_what_is_no_number() -> None:
    assert grow([[math.nan, math.nan]], 9, [0.01] * 9) == []


@pytest.mark.parametrize("share", [0.5, 1.3])
def test_a_share_of_the_chances_is_believed_and_no_more_than_one(share: float) -> None:
    rates = [[0.9, 0.2, 0.1], [0.8, 0.3]]
    assert grow(rates, 99, share=share) == grow([[min(share * rate, 1.0) for rate in own] for own in rates], 99)


def test_sizes_that_pay() -> None:
    nodes = grow([[0.5, 0.2], [0.4, 0.1]], 99)  # 0.5, 0.2, 0.2, 0.08, 0.05, 0.02
    for slope, size in ((0.0, 6), (0.3, 1), (0.1, 3)):
        costs = CostCurve(machine={}, rows=[1, 101], lengths=[1], seconds=[[1.0, 1.0 + 100 * slope]])
        assert paying(nodes, costs, 100) == size


def test_no_node_that_would_pay_is_missed_by_stopping_early() -> None:
    """With steps of any shape; and what is left out is most."""
    chooser, looked = random.Random(3), [0, 0]
    for _ in range(300):
        each = [chooser.choice([0.0, 0.1, 0.2, 0.3]) for _ in range(30)]
        seconds = [*itertools.accumulate(each, initial=1.0)]
        costs = CostCurve(machine={}, rows=range(1, 32), lengths=[1], seconds=[seconds])
        margin = Margin(costs, 5, 30, 0.001)
        rates = [sorted((chooser.random() ** 3 for _ in range(6)), reverse=True) for _ in range(5)]
        every, few = grow(rates, 30), grow(rates, 30, margin.least)
        worths = [node.worth for node in every]
        nets = [sum(worths[:size]) - seconds[size] for size in range(31)]
        size = margin.size(worths)
        assert nets[size] == pytest.approx(max(nets))
        assert every[:size] == few[: margin.size([node.worth for node in few])]
        looked[0] += len(every)
        looked[1] += len(few)
    assert looked[1] < 0.6 * looked[0]


def test_what_a_node_must_be_worth_is_what_those_behind_it_cost_at_least() -> None:
    chooser = random.Random(4)
    for size in range(1, 30):
        seconds = [*itertools.accumulate([chooser.random() ** 3 for _ in range(size)], initial=1.0)]
        costs = CostCurve(machine={}, rows=range(1, size + 2), lengths=[1], seconds=[seconds])
        due = [
            max(0.01, min((seconds[more] - seconds[nodes]) / (more - nodes) for more in range(nodes + 1, size + 1)))
            for nodes in range(size)
        ]
        assert Margin(costs, 5, size, 0.01).least == pytest.approx([*due, math.inf])


def test_what_is_faint_is_not_looked_at_where_rows_are_free() -> None:
    free = CostCurve(machine={}, rows=[1, 9], lengths=[1], seconds=[[1.0, 1.0]])
    nodes = grow([[0.5, 0.25]] * 4, 8, Margin(free, 5, 8, 0.1).least)
    assert [node.worth for node in nodes] == [0.5, 0.25, 0.25, 0.125, 0.125, 0.125]
