"""The script that counts what structured output follows, on a suite of three schemas."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine
from specdec.serve.json_grammar import Grammars
from specdec.serve.structured import Structured

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("scripts.schema_table")


def instances(*pairs: tuple[Any, bool]) -> list[dict[str, Any]]:
    return [{"data": data, "valid": valid} for data, valid in pairs]


def test_schemas_are_counted_by_what_their_grammars_allow(
    script: Any,
    tiny_engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grammars = Grammars(tiny_engine.tokenizer, tiny_engine.target.vocab_size, tiny_engine.target.eos_ids)
    both = {"properties": {"a": {"const": 1}, "b": {"const": 2}}}
    folder = tmp_path / "tests/draft7/optional/format"
    folder.mkdir(parents=True)
    files = {
        "properties": [{"schema": both, "tests": instances(({"b": 2, "a": 1.0}, True), ({"a": 2}, False))}],
        "not": [{"schema": {"not": {}}, "tests": instances((1, False))}],
        "optional/format/time": [{"schema": {"format": "time"}, "tests": instances(("23:59:60Z", True), (1, True))}],
        "optional/format/iri": [{"schema": {"format": "iri"}, "tests": instances(("x", False))}],
    }
    for name, cases in files.items():
        text = json.dumps([{"description": name, **case} for case in cases])
        (tmp_path / f"tests/draft7/{name}.json").write_text(text)
    found = script.counted(grammars, tmp_path)
    assert found == {"properties": {"followed": 1}, "not": {"refused": 1}, "format/time": {"narrower": 1}}
    assert script.table(found).endswith("| all | **1** | **1** | **1** | **0** |")

    loose = grammars.of({})
    monkeypatch.setattr(Structured, "of_schema", lambda self, schema: loose)
    assert script.counted(grammars, tmp_path)["properties"] == Counter(wrong=1)
    assert '{"a": 2}' in capsys.readouterr().err


def test_the_page_has_a_table_without_a_wrong_row() -> None:
    page = (ROOT / "docs/structured_output.md").read_text("utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ") and line.count("|") == 6]
    assert len(rows) > 20
    assert {row[5].strip().strip("*") for row in rows[1:]} == {"0"}
