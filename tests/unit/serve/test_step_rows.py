"""Rows of a step: those of the option, or as many as the measured costs allow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.costs.curve import CostCurve
from specdec.errors import ConfigError
from specdec.serve.config import ServeConfig
from specdec.serve.service import step_rows


def engine(row_seconds: float, max_rows: int = 32) -> Any:
    """An engine each of whose rows takes so long."""
    costs = CostCurve(machine={}, rows=[1, 2, 64], lengths=[1], seconds=[[row_seconds * rows for rows in (1, 2, 64)]])
    return SimpleNamespace(costs=costs, max_rows=max_rows, target=SimpleNamespace(context_length=4096))


@pytest.mark.parametrize(("row_seconds", "rows"), [(1e-5, 256), (0.0025, 100), (0.1, 32)])
def test_as_many_as_take_a_quarter_of_a_second(row_seconds: float, rows: int) -> None:
    assert step_rows(engine(row_seconds), ServeConfig(model="tiny")) == rows


def test_the_option_decides_where_it_is_given() -> None:
    assert step_rows(engine(1e-5), ServeConfig(model="tiny", max_num_batched_tokens=48)) == 48
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 31, and one draft may have max_rows = 32 rows"):
        step_rows(engine(1e-5), ServeConfig(model="tiny", max_num_batched_tokens=31))
