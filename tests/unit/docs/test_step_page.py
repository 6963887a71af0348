"""docs/step.md shows what its step really does."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from specdec import Engine, TransformersTarget
from specdec.models.tokenizer import load_tokenizer
from specdec.native.library import library

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


def followed(engine: Engine, prompt: str, *, steps: int = 10) -> set[str]:
    """The files of specdec and of drafters that run Python code for steps of a generation, after its first two."""
    found = set[str]()

    def see(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "tests"):
            found.add(str(path.relative_to(ROOT)).removeprefix("specdec/"))

    decoding = engine.start(prompt, 100)
    with engine.target.active():
        decoding.prefill()
        for _ in range(2):
            decoding.step()
        before = sys.getprofile()
        sys.setprofile(see)
        try:
            for _ in range(steps):
                decoding.step()
        finally:
            sys.setprofile(before)
    return found


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_the_page_names_the_files_of_a_token(script: dict[str, Any]) -> None:
    """All of them, and no others, as they are counted there."""
    page = (ROOT / "docs/step.md").read_text(encoding="utf-8").partition("## Where this is in the code")[2]
    table = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    plain, drafted = ({name for line in table for name in re.findall(r"`(\S+\.py)`", line[at])} for at in (2, 3))
    engine = Engine(TransformersTarget.from_pretrained("tiny"), load_tokenizer("tiny"), policy="off")
    recycling = engine.with_drafter({"name": "token_recycling", "rows": 7})
    for own, named in ((engine, plain), (recycling, plain | drafted)):
        assert followed(own, script["PROMPT"]) == named
        assert re.search(rf"\b{len(named)}\b", page), "the page counts them"
