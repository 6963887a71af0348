"""Lookahead: the pool, and sizes that follow from what rows cost. Its window is held to the text by the suites."""

from __future__ import annotations

import pytest

from drafters.lookahead import SIZES, NgramPool, Window, rows_of, sizes_for, tokens_of
from specdec.cost import CostCurve, roofline
from specdec.draft import DraftBuilder
from specdec.engine import Engine
from tests.fakes import Spy
from tests.models import prompt_of, target_of

MEASURED = (  # T(rows) / T(1) on one thread: a model of 7 M parameters, and one of 135 M
    CostCurve(machine={}, rows=[1, 2, 4, 8, 16, 64], lengths=[1], seconds=[[1.0, 0.9, 1.0, 1.65, 3.1, 11.4]]),
    CostCurve(machine={}, rows=[1, 2, 4, 8, 16, 64], lengths=[1], seconds=[[1.0, 1.02, 1.32, 2.29, 4.36, 16.0]]),
)


def test_the_scaling_law_is_the_papers() -> None:
    assert rows_of(15, 5, 15) == 1 + 14 + 45 + 60
    assert tokens_of(15, 5, 15) == pytest.approx(1.98, abs=0.01)  # the paper measures 1.96 on a 7 B model
    assert tokens_of(1, 2, 1) == pytest.approx(1 + 0.425 / 3.106)
    by_size = [tokens_of(*sizes) for sizes in SIZES]
    assert by_size == sorted(by_size)


def test_sizes_follow_from_what_rows_cost() -> None:
    for dear in (*MEASURED, roofline("cpu")):
        assert sizes_for(dear, 256, 128) == (1, 4, 1)
    free = CostCurve(machine={}, rows=[1, 200], lengths=[1], seconds=[[1.0, 1.0]])
    step = CostCurve(machine={}, rows=[1, 2, 200], lengths=[1], seconds=[[1.0, 2.0, 2.0]])  # but the second row is not
    for cheap in (free, step, roofline("cuda")):
        assert sizes_for(cheap, 256, 128) == (15, 5, 15)
    slight = CostCurve(machine={}, rows=[1, 201], lengths=[1], seconds=[[1.0, 2.0]])
    assert sizes_for(slight, 256, 128) not in (SIZES[0], SIZES[-1])


def test_sizes_fit_the_engines_rows() -> None:
    assert sizes_for(roofline("cuda"), 256, 60) == (7, 5, 7)
    assert sizes_for(roofline("cuda"), 256, 2) == (1, 4, 1)


def test_the_engine_hands_its_curve_on() -> None:
    free = CostCurve(machine={}, rows=[1, 200], lengths=[1], seconds=[[1.0, 1.0]])
    rows: list[list[int]] = []
    for costs in (free, MEASURED[1]):
        engine = Engine(target_of("llama"), costs=costs)
        spied = Spy(engine.with_drafter("lookahead").drafter)
        rows.append(engine.with_drafter(spied).generate(prompt_of(9), 40).stats.rows)
    assert max(rows[0]) > 50
    assert max(rows[1]) <= rows_of(1, 4, 1)


def test_the_pool_forgets_what_was_not_used() -> None:
    pool = NgramPool(ngram=3, guesses=2)
    pool.read([1, 2, 3, 1, 4, 5, 1, 6])
    assert list(pool.of(1)) == [(4, 5), (2, 3)]
    pool.read([1, 2, 3, 1, 4, 5, 1, 6, 7])
    assert list(pool.of(1)) == [(6, 7), (4, 5)]
    pool.add(1, (4, 5))
    assert list(pool.of(1)) == [(4, 5), (6, 7)]
    assert list(pool.of(9)) == []


def test_the_window_fills_and_slides() -> None:
    """W = 2, N = 4: level 0 starts with three tokens, two steps add a level, then n-grams come out."""
    window = Window(2, 4, [10, 11, 12])
    assert window.advance(9, [20, 21, 22]) == []  # answers of 10, 11, 12: level 1 of columns 0, 1, 2
    assert window.levels == [[11, 12], [20, 21, 22]]
    assert window.advance(9, [30, 31, 32]) == []
    assert window.levels == [[12], [21, 22], [31, 32]]
    assert window.full
    builder = DraftBuilder(9)
    assert [builder.build().tokens[row] for row in window.place(builder, "all")] == [31, 32]
    draft = builder.build()
    assert (list(draft.tokens), list(draft.parents)) == ([9, 12, 21, 22, 31, 32], [-1, 0, 0, 1, 2, 3])
    assert window.advance(9, [41, 42]) == [(9, (21, 31, 41)), (12, (22, 32, 42))]
    assert window.levels == [[22], [31, 32], [41, 42]]
