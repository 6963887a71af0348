"""docs/gguf.md has a row for every architecture and setting that is tried, and a row says what its file is read as."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specdec.native.library import library
from tests.llama_cpp import LlamaCpp

ROOT = Path(__file__).parents[3]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/gguf_matrix.py"), run_name="gguf_matrix")
PAGE = [row.rsplit("|", 2)[0] + "|" for row in (ROOT / "docs/gguf.md").read_text(encoding="utf-8").splitlines()]
COUNT = 12


def commit() -> str:
    """The commit's hash; where this is no checkout of git, some text."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no checkout"


def test_every_file_has_a_row() -> None:
    told = [row.split("|")[1:3] for row in PAGE if row.startswith("| `")]
    assert told == [[f" `{case.family}` ", f" {case.change} "] for case in SCRIPT["CASES"]], "run the script"


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no C compiler: nothing can be said of native layers")
@pytest.mark.parametrize("case", SCRIPT["drawn"](commit(), COUNT), ids=lambda case: f"{case.family}, {case.change}")
def test_a_file_is_what_its_row_says(case: Any, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    """Others at each commit; llama.cpp's logits are the truth."""
    assert SCRIPT["row_of"](case, llama_cpp, tmp_path).said in PAGE
