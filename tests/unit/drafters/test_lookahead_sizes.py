"""Lookahead's sizes follow from what rows cost."""

from __future__ import annotations

import pytest

from drafters.lookahead import SIZES, rows_of, sizes_for, tokens_of
from specdec.costs.curve import CostCurve, roofline
from specdec.engine.engine import Engine
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
    for dear in (*MEASURED, roofline()):
        assert sizes_for(dear, 256, 128) == (1, 4, 1)
    free = CostCurve(machine={}, rows=[1, 200], lengths=[1], seconds=[[1.0, 1.0]])
    step = CostCurve(machine={}, rows=[1, 2, 200], lengths=[1], seconds=[[1.0, 2.0, 2.0]])  # but the second row is not
    for cheap in (free, step, roofline(at_once=True)):
        assert sizes_for(cheap, 256, 128) == (15, 5, 15)
    slight = CostCurve(machine={}, rows=[1, 201], lengths=[1], seconds=[[1.0, 2.0]])
    assert sizes_for(slight, 256, 128) not in (SIZES[0], SIZES[-1])


def test_sizes_fit_the_engines_rows() -> None:
    assert sizes_for(roofline(at_once=True), 256, 60) == (7, 5, 7)
    assert sizes_for(roofline(at_once=True), 256, 2) == (1, 4, 1)


def test_the_engine_hands_its_curve_on() -> None:
    free = CostCurve(machine={}, rows=[1, 200], lengths=[1], seconds=[[1.0, 1.0]])
    rows: list[list[int]] = []
    for costs in (free, MEASURED[1]):
        engine = Engine(target_of("llama"), costs=costs)
        rows.append(
            engine.with_drafter(Spy(engine.with_drafter("lookahead").drafter)).generate(prompt_of(9), 40).stats.rows
        )
    assert max(rows[0]) > 50
    assert max(rows[1]) <= rows_of(1, 4, 1)
