"""Tables of README and docs are those of the runs whose manifests docs/figures keeps."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/docs_tables.py"), run_name="docs_tables")


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/notes/bench.md"])
def test_tables_are_the_manifests(page: str) -> None:
    text = (ROOT / page).read_text()
    assert SCRIPT["BLOCK"].search(text)
    assert SCRIPT["filled"](text) == text, "run scripts/docs_tables.py"


def test_a_figure_that_was_typed_is_replaced() -> None:
    text = (ROOT / "README.md").read_text()
    assert SCRIPT["filled"](text.replace("**1.92**", "**9.99**")) == text
