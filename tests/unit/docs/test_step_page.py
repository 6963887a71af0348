"""docs/step.md shows what its step really does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine

ROOT = Path(__file__).parents[3]
DECIMAL = re.compile(r"-?\d+\.\d+")


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts/draw_step.py"), run_name="draw_step")


def test_the_page_shows_the_step(script: dict[str, Any], tiny_engine: Engine) -> None:
    """Tokens, rows, slots and paths are equal; logits may be rounded otherwise on another machine."""
    page = (ROOT / "docs/step.md").read_text(encoding="utf-8")
    # What a number is replaced by is as long as it, so that a place in the one text is that place in the other.
    blank = DECIMAL.sub(lambda number: "#" * len(number[0]), page)
    tables = script["Tables"](script["record"](tiny_engine), tiny_engine.tokenizer).all()
    for table in tables:
        start = blank.find(DECIMAL.sub(lambda number: "#" * len(number[0]), table))
        assert start >= 0, f"docs/step.md lacks what scripts/draw_step.py prints:\n{table}"
        shown = [float(number) for number in DECIMAL.findall(page[start : start + len(table)])]
        assert shown == pytest.approx([float(number) for number in DECIMAL.findall(table)], abs=0.011)


def test_the_step_is_worth_showing(script: dict[str, Any], tiny_engine: Engine) -> None:
    """Its tree has branches, and accepted rows have to be moved."""
    step = script["record"](tiny_engine)
    assert len(step.draft.children()[0]) >= 2
    assert len(step.verdict.path) >= 3
    assert step.verdict.path != list(range(len(step.verdict.path)))
