"""A run's folder as a kill, a full disk, another version or a stranger left it: refused by name, or gone on with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine
from specdec.bench.audit import audit
from specdec.bench.compare import compare_runs
from specdec.bench.metrics import measure
from specdec.bench.plan import Plan
from specdec.bench.records import AnsweredTurn, Record, RunFolder
from specdec.bench.runner import Runner
from specdec.engine.config import resolve
from specdec.errors import ConfigError, SpecdecError
from specdec.settings.options import Given

SECONDS = {"wall": 1.0, "prefill": 0.5}
TURN = AnsweredTurn(
    prompt_ids=[1, 2], token_ids=[3, 4], text="x", finish_reason="eos", accept_lengths=[2], rows=[3], seconds=SECONDS,
    retokenized=2, peak_memory=None, pieces=["x"],
)  # fmt: skip
RECORD = asdict(Record(question_id=1, category="qa", system="none", repeat=0, turns=[TURN]))
VALUES = (None, 10**30, -1, 1.5, "x", True, [], {}, [None], [[1]], {"x": "y"}, float("nan"))
MANIFEST: dict[str, Any] = {
    "plan": {"temperature": 0.0, "max_new_tokens": 4, "repeats": 1, "model": "tiny"},
    "questions": {"file": "q.jsonl", "sha256": "0", "asked": 1},
    "model": {"name": "tiny", "dtype": "float32", "fingerprint": "0"},
    "systems": {"none": {"ours": True, "lossy": False, "comparable": True, "options": {}}},
    "left_out": {},
    "environment": {
        "commit": None, "uncommitted_changes": False, "versions": {"torch": "2", "transformers": "5"}, "device": "cpu",
        "cuda": None, "cpu": "abacus", "threads": 1,
    },
    "runs": [{"command": ""}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.write_manifest(MANIFEST)
    return run


def test_what_is_whole_is_read(folder: RunFolder) -> None:
    folder.answers.write_text(json.dumps(RECORD) + "\n")
    assert folder.manifest() == MANIFEST
    assert [record.key for record in folder.records()] == [(1, "none", 0)]


@pytest.mark.parametrize("key", RECORD)
def test_a_record_with_a_value_that_cannot_be(key: str, folder: RunFolder, tiny_engine: Engine) -> None:
    """Refused with the number of its line; what is taken can be measured, audited and compared, or is refused there."""
    for value in VALUES:
        folder.answers.write_text(json.dumps(RECORD) + "\n" + json.dumps({**RECORD, key: value, "repeat": 1}) + "\n")
        try:
            records = folder.records()
            audit(records, MANIFEST["systems"], tiny_engine.target, Plan().sampling())
            measure(records, ["none"])
            compare_runs(folder, folder)
        except SpecdecError as error:
            assert len(str(error)) < 600  # noqa: PT017


@pytest.mark.parametrize("key", asdict(TURN))
def test_a_turn_with_a_value_that_cannot_be(key: str, folder: RunFolder, tiny_engine: Engine) -> None:
    for value in (*VALUES, [10**9], [-1], {"wall": -1.0}, {"wall": 1e999}, {"prefill": 1.0}):
        folder.answers.write_text(json.dumps({**RECORD, "turns": [{**asdict(TURN), key: value}]}) + "\n")
        try:
            records = folder.records()
            audit(records, MANIFEST["systems"], tiny_engine.target, Plan().sampling())
            measure(records, ["none"])
        except SpecdecError as error:
            assert len(str(error)) < 600  # noqa: PT017


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[]", "Input should be an object, and is []"),
        (b"null", "Input should be an object, and is None"),
        (b'{"question_id": 1}', "category: Field required"),
        (json.dumps({**RECORD, "younger": 1}).encode(), "younger: Unexpected keyword argument, and is 1"),
        (json.dumps({**RECORD, "turns": [{"text": "x"}]}).encode(), "turns.0.token_ids: Field required"),
        (
            json.dumps({**RECORD, "question_id": [1]}).encode(),
            "question_id.int: Input should be a valid",
        ),
        (b"\xff\xfe", "line 1: no answer record"),
        (b"\0" * 8, "line 1: no answer record"),
        (b"[" * 100_000, "recursion limit exceeded"),
        (b"9" * 5000, "number out of range"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: bytes, words: str, folder: RunFolder) -> None:
    folder.answers.write_bytes(line + b"\n")
    with pytest.raises(
        ConfigError, match=r"line 1: no answer record: .*; delete the line, and the run answers"
    ) as caught:
        folder.records()
    assert words in str(caught.value)
    folder.answers.write_bytes(line)  # a kill's half line
    assert folder.records() == []


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places in a nest of mappings and lists."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(place for key, part in parts for place in paths(part, (*before, key)))]


def test_a_manifest_with_a_value_that_cannot_be(folder: RunFolder) -> None:
    """At any place of it; what is taken can be compared."""
    folder.answers.write_text(json.dumps(RECORD) + "\n")
    for place in paths(MANIFEST):
        for value in VALUES:
            changed = json.loads(json.dumps({"it": MANIFEST}))
            part, last = changed, "it"
            for key in place:
                part, last = part[last], key
            part[last] = value
            folder.manifest_path.write_text(json.dumps(changed["it"]))
            try:
                compare_runs(folder, folder)
            except SpecdecError as error:
                assert len(str(error)) < 600  # noqa: PT017


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"plan": {}}', '{"plan": []}', "[" * 100_000, "9" * 5000, "\0"]
)
def test_a_broken_manifest_is_named_before_a_model_is_loaded(
    text: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.bench.runner.load", lambda plan: pytest.fail("loaded"))
    folder.manifest_path.write_text(text)
    with pytest.raises(ConfigError, match=r"holds no run, as manifest\.json says"):
        Runner(Plan(), folder.path)


@pytest.mark.parametrize("place", ["file", "file/run"])
def test_a_folder_that_is_none(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named before a model is loaded."""
    monkeypatch.setattr("specdec.bench.runner.load", lambda plan: pytest.fail("loaded"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"cannot write a run to '.*file' is a file; give another --out"):
        Runner(Plan(), tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("place", ["/proc/run", "a\0b"])
def test_a_folder_that_cannot_be_made(place: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot write to .*; give another --out"), RunFolder(place).writing():
        pass


def test_answers_without_a_manifest_are_no_run(folder: RunFolder, tiny_engine: Engine) -> None:
    folder.answers.write_text(json.dumps(RECORD) + "\n")
    folder.manifest_path.unlink()
    with pytest.raises(ConfigError, match="holds answers and no manifest"):
        Runner(Plan(drafters=["none"], systems=[], limit=1), folder.path, engine=tiny_engine)


@pytest.mark.few(1)
@pytest.mark.parametrize("part", ["mkdir", "open", "replace"])
def test_a_disk_that_refuses(part: str, tmp_path: Path, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Runner:
        plan = Plan(drafters=["none"], systems=[], limit=1, repeats=1, max_new_tokens=2)
        return Runner(plan, tmp_path / "run", engine=tiny_engine, cost=False)

    runner = make()

    def full(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, part, full)
        with pytest.raises(ConfigError, match="No space left on device"):
            runner.run()
    assert len(make().run().records()) == 1


def test_settings_of_a_plan_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    for text in ("drafters: 5", "drafters: [5]", "systems: {a: 1}", "drafters: [{label: 3}]"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            resolve(Plan, Given(file=path, settings=["lookahead.window=5"]))
