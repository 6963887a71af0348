"""Trees grow by worth, to the size that pays."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from drafters.shared.scored_tree import ScoredTree
from specdec.costs.curve import CostCurve
from specdec.costs.prices import Prices


def grown(rates: list[list[float]], most: int, least: list[float] | None = None, share: float = 1.0) -> ScoredTree:
    """Of chances by depth and rank; a row's token is its rank."""
    tree, each = ScoredTree(), [[*enumerate(own)] for own in rates]
    tree.grow(lambda row: each[tree.depths[row]], most, len(rates), least, share)
    return tree


def rows_of(tree: ScoredTree) -> list[tuple[int, int, float]]:
    return [*zip(tree.parents, tree.tokens, tree.reach, strict=True)]


def test_trees_grow_by_reach() -> None:
    rates = [[0.6, 0.2, 0.1], [0.5, 0.3]]
    tree = grown(rates, 99)
    paths = [tuple(tree.path(row)) for row in range(1, len(tree))]
    assert tree.depths == [0, *map(len, paths)]
    every = [path for size in (1, 2) for path in itertools.product(range(3), range(2)) for path in [path[:size]]]
    assert sorted(paths) == sorted(set(every))
    reach = {path: rates[0][path[0]] * (rates[1][path[1]] if len(path) > 1 else 1.0) for path in paths}
    assert tree.reach[1:] == pytest.approx(sorted(reach.values(), reverse=True))
    assert [reach[path] for path in paths] == pytest.approx(tree.reach[1:])
    assert rows_of(grown(rates, 3)) == rows_of(tree)[:4]
    assert rows_of(grown(rates, 99, [tree.reach[5]] * 99)) == [row for row in rows_of(tree) if row[2] >= tree.reach[5]]


def test_guesses_may_depend_on_the_path_and_be_none() -> None:
    """Behind a token of 1 there is 2, behind one of 2 nothing; each row is asked for once, in order, but the last."""
    tree, asked = ScoredTree(7), list[int]()
    guesses = {7: [(1, 0.5), (2, 0.25)], 1: [(2, 0.75)], 2: []}

    def behind(row: int) -> list[tuple[int, float]]:
        asked.append(row)
        return guesses[tree.tokens[row]]

    tree.grow(behind, 9, 9)
    assert (tree.tokens, tree.parents, asked) == ([7, 1, 2, 2], [-1, 0, 1, 0], [0, 1, 2, 3])
    assert (tree.chances, tree.reach) == ([1.0, 0.5, 0.75, 0.25], [1.0, 0.5, 0.375, 0.25])
    asked.clear()
    tree = ScoredTree(7)
    tree.grow(behind, 9, 1)
    assert (tree.tokens, asked) == ([7, 1, 2], [0])
    tree.add(2, 5, 0.5)
    assert (tree.depths, tree.reach[-1], tree.path(3)) == ([0, 1, 1, 2], 0.125, [2, 5])


def test_no_tree_grows_of_what_is_no_number() -> None:
    assert len(grown([[math.nan, math.nan]], 9, [0.01] * 9)) == 1


@pytest.mark.parametrize("share", [0.5, 1.3])
def test_a_share_of_the_chances_is_believed(share: float) -> None:
    rates = [[0.9, 0.2, 0.1], [0.8, 0.3]]
    tree = grown(rates, 99, share=share)
    scaled = grown([[share * rate for rate in own] for own in rates], 99)
    assert (tree.parents, tree.tokens) == (scaled.parents, scaled.tokens)
    assert tree.reach == pytest.approx(scaled.reach)
    assert tree.chances == pytest.approx([1.0, *(chance / share for chance in scaled.chances[1:])])


def test_no_node_that_would_pay_is_missed_by_stopping_early() -> None:
    """With steps of any shape; and what is left out is most."""
    chooser, looked = random.Random(3), [0, 0]
    for _ in range(300):
        each = [chooser.choice([0.0, 0.1, 0.2, 0.3]) for _ in range(30)]
        seconds = [*itertools.accumulate(each, initial=1.0)]
        costs = CostCurve(machine={}, rows=range(1, 32), lengths=[1], seconds=[seconds])
        prices = Prices(costs)
        rates = [sorted((chooser.random() ** 3 for _ in range(6)), reverse=True) for _ in range(5)]
        every, few = grown(rates, 30), grown(rates, 30, prices.least_reach(5, 30, 0.001))
        worths = every.reach[1:]
        nets = [sum(worths[:size]) - seconds[size] for size in range(31)]
        size = prices.keep(worths, 5)
        assert nets[size] == pytest.approx(max(nets))
        assert rows_of(every)[: size + 1] == rows_of(few)[: prices.keep(few.reach[1:], 5) + 1]
        looked[0] += len(every) - 1
        looked[1] += len(few) - 1
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
        assert Prices(costs).least_reach(5, size, 0.01) == pytest.approx([*due, math.inf])


def test_what_is_faint_is_not_looked_at_where_rows_are_free() -> None:
    free = CostCurve(machine={}, rows=[1, 9], lengths=[1], seconds=[[1.0, 1.0]])
    tree = grown([[0.5, 0.25]] * 4, 8, Prices(free).least_reach(5, 8, 0.1))
    assert tree.reach[1:] == [0.5, 0.25, 0.25, 0.125, 0.125, 0.125]
