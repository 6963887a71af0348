"""REST: the trie of frequent continuations against counting by hand, and its drafts."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from drafters.rest import datastore
from drafters.rest.drafter import Rest, RestConfig, frequent_prefixes
from specdec import Draft, Engine
from specdec.cli.main import build
from specdec.errors import CheckpointError, ConfigError
from tests.models import target_of
from tests.unit.drafters.test_datastore import store_of
from tests.unit.drafters.test_token_recycling import context_of

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=30)


@pytest.mark.slow
@given(ROWS, st.integers(1, 12), st.data())
def test_frequent_prefixes_against_counting(rows: list[list[int]], count: int, data: st.DataObject) -> None:
    for row in rows:  # some end early
        end = data.draw(st.integers(0, 4))
        row[end:] = [-1] * (4 - end)
    found = np.asarray(sorted(rows), np.int64)
    counts = Counter(tuple(row[:size]) for row in rows for size in range(1, 5) if row[size - 1] >= 0)
    expected = sorted(counts, key=lambda prefix: (-counts[prefix], len(prefix), prefix))[:count]
    prefixes: list[tuple[int, ...]] = [()]
    for parent, token in frequent_prefixes(found, count):
        prefixes.append((*prefixes[parent], token))
    assert prefixes[1:] == expected


def draft_of(tmp_path: Path, text: list[int], *, row_budget: int = 20, remaining: int = 50, **options: Any) -> Draft:
    store = store_of(tmp_path, "1 2 3 4 5", "1 2 3 4 6", "9 2 7 7", "9 2 8", "8 2 8")
    return Rest(RestConfig(**options), store).start(context_of(text, remaining)).propose(row_budget)


def test_draft_is_what_followed_the_longest_suffix(tmp_path: Path) -> None:
    draft = draft_of(tmp_path, [4, 4, 1, 2])
    assert (list(draft.tokens), list(draft.parents)) == ([2, 3, 4, 5, 6], [-1, 0, 1, 2, 2])
    draft = draft_of(tmp_path, [4, 4, 5, 2], min_suffix=1, rows=3)
    # After 2 alone: 3 4 twice, 8 twice, 7 7 once.
    assert (list(draft.tokens), list(draft.parents)) == ([2, 3, 8, 4], [-1, 0, 0, 1])


@pytest.mark.few(2)
@pytest.mark.parametrize("strides", [(1, 1, 1, 1, 1, 1, 1), (2, 1, 3, 1), (4, 3)])
def test_a_session_finds_what_a_fresh_one_does(tmp_path: Path, strides: tuple[int, ...]) -> None:
    """It looks for no longer suffixes than the text can have by now; a longer one may come after a short one."""
    text = [4, 1, 2, 3, 4, 9, 2, 8]
    store = store_of(tmp_path, "1 2 3 4 5", "1 2 3 4 6", "9 2 7 7", "9 2 8", "8 2 8")
    context = context_of(text[:1], 50)
    session = Rest(RestConfig(min_suffix=1), store).start(context)
    session.propose(20)
    for stride in strides:
        context.tokens.extend(text[len(context.tokens) :][:stride])
        assert session.propose(20).tokens == draft_of(tmp_path, list(context.tokens), min_suffix=1).tokens


def test_draft_keeps_to_its_limits(tmp_path: Path) -> None:
    text = [4, 4, 1, 2]
    assert list(draft_of(tmp_path, text, row_budget=3).tokens) == [2, 3, 4]
    assert list(draft_of(tmp_path, text, row_budget=1).tokens) == [2]
    assert list(draft_of(tmp_path, text, remaining=1).tokens) == [2]
    assert max(draft_of(tmp_path, text, tokens=2).depths) == 2
    assert max(draft_of(tmp_path, text, remaining=2).depths) == 1
    assert list(draft_of(tmp_path, text, min_suffix=3).tokens) == [2]
    assert list(draft_of(tmp_path, [4, 4], min_suffix=2).tokens) == [4]
    assert list(draft_of(tmp_path, [4]).tokens) == [4]
    assert len(draft_of(tmp_path, text, max_suffix=2, matches=1)) == 4  # one continuation: 3 4 5


def test_end_of_the_corpus_has_no_continuation(tmp_path: Path) -> None:
    assert list(draft_of(tmp_path, [4, 6]).tokens) == [6]


def test_rest_needs_a_datastore_that_is_there(tmp_path: Path) -> None:
    target = target_of("llama")
    with pytest.raises(ConfigError, match=r"rest\.datastore is not set; make one with `specdec datastore build"):
        Engine(target, None, "rest")
    with pytest.raises(CheckpointError, match="no datastore at"):
        Engine(target, None, {"name": "rest", "datastore": str(tmp_path)})
    other = store_of(tmp_path, "1 2 3", vocab_size=33)
    with pytest.raises(CheckpointError, match="a tokenizer of 33 tokens"):
        Engine(target, None, {"name": "rest", "datastore": str(other.path)})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_suffix": 0}, "rest.min_suffix is 0 and max_suffix 16"),
        ({"min_suffix": 5, "max_suffix": 4}, "1 <= min_suffix <= max_suffix"),
        ({"matches": 0}, "rest.matches is 0; it must be at least 1"),
        ({"tokens": 0}, "rest.tokens is 0; it must be at least 1"),
        ({"rows": 0}, "rest.rows is 0; it must be at least 1"),
    ],
)
def test_options_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RestConfig(**values)


@pytest.mark.slow
def test_the_two_commands_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the head of configs/drafter/rest.yaml says them, on a smaller library."""
    config = Path(__file__).parents[3] / "configs" / "drafter" / "rest.yaml"
    lines = [line for line in config.read_text().splitlines() if line.startswith("# specdec")]
    generate, make = (shlex.split(line[2:])[1:] for line in lines)
    library = [(f"{n}.py", "import os\nimport sys\n" * 3) for n in range(2)]
    monkeypatch.setattr(datastore, "read_files", lambda *, held_out: [] if held_out else library)
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    assert "tokens of 2 documents" in run.invoke(build(), make, catch_exceptions=False).output
    generate[generate.index("configs/drafter/rest.yaml")] = str(config)
    assert run.invoke(build(), [*generate, "--max-new-tokens", "4"], catch_exceptions=False).exit_code == 0
