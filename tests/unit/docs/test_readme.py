"""What README and docs show is what is tested."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_drafter_that_readme_shows_is_the_tested_one() -> None:
    source = (ROOT / "tests/unit/third_party_drafter.py").read_text()
    assert source.strip() in (ROOT / "README.md").read_text()


def test_the_grammar_that_docs_show_is_the_tested_one() -> None:
    source = (ROOT / "tests/unit/third_party_grammar.py").read_text()
    assert source.strip() in (ROOT / "docs/batch.md").read_text()


def test_readme_names_every_drafter() -> None:
    from specdec.drafting.registry import drafter_names

    text = (ROOT / "README.md").read_text()
    assert [name for name in drafter_names() if f"| `{name}` |" not in text] == []
