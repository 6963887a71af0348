"""The arithmetic of the scripts that reproduce the papers' figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from specdec.bench.plan import Plan, label_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_expected_tokens_are_those_of_independent_guesses() -> None:
    """E by simulation: W guesses of g tokens, each right with probability alpha; the best one counts, and the bonus."""
    script = load("scaling_law")
    rng = np.random.default_rng(0)
    alpha, window, ngram = 0.4, 5, 4
    right = rng.random((200_000, window, ngram - 1)) < alpha
    lengths = np.cumprod(right, axis=2).sum(2).max(1) + 1
    assert script.expected(alpha, window, ngram) == pytest.approx(lengths.mean(), abs=0.01)


def test_fit_finds_the_law_that_made_the_points() -> None:
    script = load("scaling_law")
    grid = [(w, n) for w in (1, 2, 4, 8, 16) for n in (3, 5)]
    points = [(w, n, script.law(*script.PAPER, w, n), 0.0) for w, n in grid]
    alpha, f, error = script.fit(points)
    assert (alpha, f) == pytest.approx(script.PAPER, abs=2e-3)
    assert error < 1e-3


def test_ablation_is_a_plan_whose_rows_all_reach_the_table() -> None:
    script = load("lookahead_ablation")
    plan = Plan(drafters=script.drafters())
    labels = [label_of(spec) for spec in plan.drafters]
    assert labels == ["none", "prompt_lookup", *(row[0] for row in script.ROWS)]
    balanced = plan.drafters[labels.index("balanced")]
    assert isinstance(balanced, dict)
    assert (balanced["ngram"], balanced["window"], balanced["guesses"]) == (5, 15, 15)
    assert not balanced["pool_from_prompt"]
