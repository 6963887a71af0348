"""Datastore: the suffix array against sorting, searches against scanning, files that are whole or refused."""

from __future__ import annotations

import builtins
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from drafters.rest import datastore
from drafters.rest.cli import app
from drafters.rest.datastore import SEPARATOR, Datastore, build_datastore, opened, read_documents, suffix_array
from specdec import Engine
from specdec.errors import CheckpointError, ConfigError, SpecdecError
from tests.models import Numerals, target_of


def store_of(tmp_path: Path, *texts: str, vocab_size: int = 32) -> Datastore:
    """A datastore of texts of numerals."""
    sources = []
    for number, text in enumerate(texts):
        sources.append(tmp_path / f"{number}.txt")
        sources[-1].write_text(text, encoding="utf-8")
    return build_datastore(sources, Numerals(vocab_size), tmp_path / "store")


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.few(1)
@pytest.mark.parametrize("library", [True, False])
@given(tokens=st.lists(st.sampled_from([0, 1, 255, 256, 70_000, SEPARATOR]), min_size=1, max_size=60))
def test_suffix_array_sorts_the_suffixes(library: bool, tokens: list[int]) -> None:
    array = np.asarray(tokens, ">u4")
    if library:
        pytest.importorskip("pydivsufsort")
        found = suffix_array(array)
    else:
        found = datastore._doubling(np.unique(array, return_inverse=True)[1].astype(np.uint32))
    assert found.tolist() == sorted(range(len(tokens)), key=lambda start: tokens[start:])


def test_without_the_library_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "1 2 1 2 3 1 2 1 2 4"
    with_library = digest(store_of(tmp_path, text, text).path)

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert digest(store_of(tmp_path, text, text).path) == with_library


def test_tokens_are_documents_and_separators(tmp_path: Path) -> None:
    store = store_of(tmp_path, "3 1", "", "4")
    assert store.tokens.dtype == ">u4"
    assert store.tokens.tolist() == [3, 1, SEPARATOR, 4, SEPARATOR]
    assert (store.meta["tokens"], store.meta["documents"], store.meta["vocab_size"]) == (5, 2, 32)
    assert store.meta["sha256"] == hashlib.sha256(store.tokens.tobytes()).hexdigest()


@pytest.mark.slow
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=50), query=st.lists(st.integers(0, 3), min_size=1, max_size=6)
)
def test_find_and_longest_suffix_against_scanning(
    text: list[int], query: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = store_of(tmp_path_factory.mktemp("find"), " ".join(map(str, text)))
    starts = [start for start in range(len(text)) if text[start : start + len(query)] == query]
    assert sorted(int(store.suffixes[place]) for place in store.find(query)) == starts
    known = [
        size
        for size in range(1, len(query) + 1)
        if any(text[start : start + size] == query[-size:] for start in range(len(text)))
    ]
    for least in (1, 2, 3):
        length, places = store.longest_suffix(query, least)
        assert length == (max(known) if known and max(known) >= least else 0)
        assert bool(places) is bool(length)


def test_continuations_end_with_their_documents(tmp_path: Path) -> None:
    store = store_of(tmp_path, "1 2 3", "1 2 4 5 6", "1 2")
    places = store.find([1, 2])
    assert store.continuations(places, 2, 3, 10).tolist() == [[3, -1, -1], [4, 5, 6], [-1, -1, -1]]


def test_continuations_are_spread_over_all_matches(tmp_path: Path) -> None:
    store = store_of(tmp_path, *(f"1 {after}" for after in range(10, 20)))
    found = store.continuations(store.find([1]), 1, 1, 5)
    assert found[:, 0].tolist() == [10, 12, 14, 16, 18]


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    first = digest(store_of(tmp_path, "1 2 3", "4").path)
    assert digest(store_of(tmp_path, "1 2 3", "4").path) == first  # over the old one, too
    assert {path.name for path in tmp_path.iterdir()} == {"0.txt", "1.txt", "store"}  # nothing left over
    assert digest(store_of(tmp_path, "1 2 3", "5").path) != first


def test_a_build_that_fails_leaves_the_old_datastore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(store_of(tmp_path, "1 2 3").path)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="no space"):
        store_of(tmp_path, "4 5")
    assert digest(tmp_path / "store") == first
    assert {path.name for path in tmp_path.iterdir()} == {"0.txt", "store"}


def test_a_move_that_fails_leaves_the_old_datastore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest(store_of(tmp_path, "1 2 3").path)

    def stuck(path: Path, target: Path) -> Path:
        raise OSError("device busy")

    monkeypatch.setattr(Path, "replace", stuck)
    with pytest.raises(OSError, match="device busy"):
        store_of(tmp_path, "4 5")
    assert digest(tmp_path / "store") == first
    assert {path.name for path in tmp_path.iterdir()} == {"0.txt", "store"}


def test_folders_are_read_in_order_without_pictures_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.py").write_text("second", encoding="utf-8")
    (tmp_path / "a.md").write_text("first", encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden", encoding="utf-8")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\xff\xfe")
    assert list(read_documents([tmp_path])) == ["first", "second"]


def test_sharegpt_files_give_the_assistants_turns(tmp_path: Path) -> None:
    items = [
        {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2 3"}]},
        {"messages": [{"role": "user", "content": "4"}, {"role": "assistant", "content": "5"}]},
    ]
    (tmp_path / "a.json").write_text(json.dumps(items), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, items)) + "\n\n", encoding="utf-8")
    for name in ("a.json", "b.jsonl"):
        assert list(read_documents([tmp_path / name])) == ["2 3", "5"]


@pytest.mark.parametrize("text", ["{not json", '["text"]', '[{"conversations": 3}]', '{"a": 1}', '[{"id": 1}]'])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is no (JSON|ShareGPT file)"):
        list(read_documents([tmp_path / "a.json"]))


def test_sources_without_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hold no tokens; give UTF-8 text"):
        store_of(tmp_path, "", "  ")
    with pytest.raises(ConfigError, match=r"\(none\) hold no tokens"):
        store_of(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        build_datastore([tmp_path / "nowhere"], Numerals(32), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_folder_that_is_no_datastore_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists and is no datastore"):
        store_of(tmp_path, "1 2")
    assert (tmp_path / "store" / "thesis.txt").exists()


def test_a_datastore_is_opened_once_and_again_when_it_was_built_anew(tmp_path: Path) -> None:
    store_of(tmp_path, "1 2 3")
    first = opened(tmp_path / "store")
    assert opened(tmp_path / "store") is first
    store_of(tmp_path, "1 2 3 4")
    assert len(opened(tmp_path / "store")) == 5


def test_no_datastore(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no datastore at .*specdec datastore build SOURCE"):
        Datastore(tmp_path)


@pytest.mark.parametrize("name", ["tokens.npy", "suffixes.npy"])
@pytest.mark.parametrize("left", [0, 20, 140])
def test_a_file_cut_short_is_refused(tmp_path: Path, name: str, left: int) -> None:
    path = store_of(tmp_path, "1 2 3 4 5").path / name
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=f"{name}.* is missing or cut short: .*build` again"):
        Datastore(path.parent)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing or cut short"):
        Datastore(path.parent)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 0}, "meta.json says: tokens: Input should be greater than or equal to 1, and is 0; make one"),
        ({"format": 9}, "meta.json says: format: Input should be 1, and is 9; make one"),
        ({"tokens": 7}, r"holds \[6\] of >u4, its meta.json says 7 tokens; the files are of two builds"),
        ({"suffix_type": "<i8"}, "the files are of two builds"),
    ],
)
def test_a_meta_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    store = store_of(tmp_path, "1 2 3 4 5")
    (store.path / "meta.json").write_text(json.dumps({**store.meta, **change}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=words):
        Datastore(store.path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_a_broken_meta_is_refused(tmp_path: Path, text: str) -> None:
    store = store_of(tmp_path, "1 2")
    (store.path / "meta.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="datastore"):
        Datastore(store.path)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target = target_of("llama")
    assert store_of(tmp_path, "1 2").check(target)
    with pytest.raises(CheckpointError, match=r"a tokenizer of 99 tokens, the target's vocabulary has 32"):
        store_of(tmp_path, "1 2", vocab_size=99).check(target)


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\nprint(os.name)\n", encoding="utf-8")
    run = CliRunner().invoke(app, ["build", str(tmp_path / "a.py"), "--out", str(tmp_path / "store")])
    assert run.exit_code == 0, run.output
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "store")])
    assert shown.output == run.output
    assert f"{Datastore(tmp_path / 'store').meta['tokens']} tokens of 1 documents" in shown.output
    missing = CliRunner().invoke(app, ["build", str(tmp_path / "a.py"), "--out", "x", "--tokenizer", str(tmp_path)])
    assert isinstance(missing.exception, SpecdecError)
    assert "no tokenizer at" in str(missing.exception)


def test_command_line_imports_nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ``specdec --help`` answers at once."""
    real, seen = builtins.__import__, list[str]()

    def noting(name: str, *arguments: Any, **options: Any) -> Any:
        seen.append(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", noting)
    importlib.reload(importlib.import_module("drafters.rest.cli"))
    assert not {"torch", "transformers", "drafters.rest.datastore"}.intersection(seen)


def test_a_store_of_another_tokenizer_is_refused(tmp_path: Path, tiny_engine: Engine) -> None:
    (tmp_path / "a.txt").write_text("import os\n", encoding="utf-8")
    own = build_datastore([tmp_path / "a.txt"], tiny_engine.tokenizer, tmp_path / "own")
    assert own.check(tiny_engine.target) is own
    (tmp_path / "b.txt").write_text("1 2 3", encoding="utf-8")
    other = build_datastore([tmp_path / "b.txt"], Numerals(4096), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"was built with another tokenizer \(.*\) than the target's"):
        other.check(tiny_engine.target)
