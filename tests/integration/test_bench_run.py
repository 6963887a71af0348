"""Runs on the embedded model: what is recorded, in which order, resuming, failures, and the audit's verdicts."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specdec import Engine
from specdec.bench.audit import Audit, audit, rounding_bound
from specdec.bench.plan import Plan, labelled
from specdec.bench.records import AnsweredTurn, Output, Record, RunFolder
from specdec.bench.runner import Runner, answer_prompts
from specdec.bench.systems import Drafted, make_systems
from specdec.bench.transformers_systems import TransformersSystem
from specdec.cli.main import build
from specdec.engine.load import load
from specdec.errors import CheckpointError, ConfigError
from specdec.models.loading import embedded_model
from specdec.settings.sampling_params import SamplingParams
from specdec.settings.validation import read_json
from specdec.target import run_steps
from tests.models import live, new_model

UNFREEZE = gc.unfreeze  # no test calls it otherwise, see tests/conftest.py

QUESTIONS = [
    {"question_id": 1, "category": "completion", "turns": ["import os\nimport sys\nimport os\nimport"]},
    {"question_id": 2, "category": "tests", "turns": ["class ATest(unittest.TestCase):\n", "    def test_b(self):\n"]},
]
DRAFTERS: list[str | dict[str, Any]] = ["none", "prompt_lookup", "lookahead"]


def asked_in(folder: Path) -> Path:
    """A file of the questions."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({**question, "format": "plain"}) + "\n" for question in QUESTIONS))
    return file


@pytest.fixture
def questions(tmp_path: Path) -> str:
    return str(asked_in(tmp_path))


Make = Callable[..., Runner]


@pytest.fixture
def make(tiny_engine: Engine, questions: str, tmp_path: Path) -> Make:
    """``make(repeats=2, ...)``: a runner in the test's folder, on the embedded model in float64."""

    def make_runner(on_system: Callable[[str, int], None] = lambda label, answers: None, **options: Any) -> Runner:
        values: dict[str, Any] = {"questions": questions, "drafters": DRAFTERS, "systems": [], "max_new_tokens": 12}
        plan = Plan(**{**values, "repeats": 1, **options})
        return Runner(plan, tmp_path / "run", engine=tiny_engine, on_system=on_system, cost=False)

    return make_runner


@pytest.fixture(scope="module")
def answered(tiny_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A whole run of the questions, that is only read."""
    place = tmp_path_factory.mktemp("answered")
    plan = Plan(questions=str(asked_in(place)), drafters=DRAFTERS, systems=[], max_new_tokens=12, repeats=1)
    return Runner(plan, place / "run", engine=tiny_engine, cost=False).run()


def keys(folder: RunFolder) -> list[tuple[int | str, str, int]]:
    return [read_json(Record, line).key for line in folder.answers.read_text().splitlines()]


@pytest.mark.slow
def test_all_systems_give_the_same_text_and_say_what_it_cost(make: Make, tiny_engine: Engine) -> None:
    early_exit = {"name": "transformers_early_exit", "assistant_early_exit": 2}
    folder = make(systems=["transformers", "transformers_lookup", early_exit], repeats=2).run()
    records = folder.records()
    assert len(records) == 2 * 6 * 2
    assert {record.error for record in records} == {None}
    for record in records:
        for turn in record.turns:
            assert sum(turn.accept_lengths) == len(turn.token_ids) <= 12
            assert 0 < turn.seconds["prefill"] < turn.seconds["wall"]
            assert "".join(turn.pieces) == ("" if record.repeat else tiny_engine.tokenizer.decode(turn.token_ids))
            if record.system in ("none", "prompt_lookup", "lookahead"):
                assert len(turn.rows) == len(turn.accept_lengths)
                assert turn.seconds["target"] > 0
    texts = {
        (r.question_id, n): turn.token_ids for r in records if r.system == "none" for n, turn in enumerate(r.turns)
    }
    assert all(turn.token_ids == texts[r.question_id, n] for r in records for n, turn in enumerate(r.turns))
    found = audit(records, folder.manifest()["systems"], tiny_engine.target, SamplingParams())
    assert found.passed
    assert {str(verdict) for verdict in found.systems.values()} == {"identical"}


@pytest.mark.slow
def test_second_turn_follows_the_own_answer(make: Make, tiny_engine: Engine) -> None:
    for record in make(drafters=["none"]).run().records():
        if record.question_id == 2:
            first, second = record.turns
            text = f"{QUESTIONS[1]['turns'][0]}\n{first.text}\n{QUESTIONS[1]['turns'][1]}"
            assert second.prompt_ids == tiny_engine.tokenizer(text)["input_ids"]


@pytest.mark.slow
def test_the_cache_is_kept_between_turns_where_one_asks_for_it(make: Make) -> None:
    records = [r for r in make(keep_prefix=True, drafters=["prompt_lookup"]).run().records() if r.question_id == 2]
    plain, drafted = sorted(records, key=lambda record: record.system)
    assert [turn.token_ids for turn in plain.turns] == [turn.token_ids for turn in drafted.turns]
    for record in (plain, drafted):
        first, second = record.turns
        assert first.reused == 0
        assert len(first.prompt_ids) - 1 <= second.reused < len(second.prompt_ids)


@pytest.mark.slow
def test_prompts_of_tokens_are_answered_in_turn(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt by prompt and repeat by repeat, after one uncounted answer of each; drafters learn nothing from before."""
    asked: list[tuple[str, list[int]]] = []
    warmed, reset = list[str](), list[str]()
    answer, forget = Drafted.answer, Drafted.reset
    monkeypatch.setattr(Drafted, "warm_up", lambda own, prompt, budget: warmed.append(own.label))
    monkeypatch.setattr(Drafted, "answer", lambda own, *rest: asked.append((own.label, rest[0])) or answer(own, *rest))
    monkeypatch.setattr(Drafted, "reset", lambda own: reset.append(own.label) or forget(own))
    prompts, rounds = [[0, 5, 6], [0, 7, 5, 7, 5]], list[int]()
    plan = Plan(drafters=["prompt_lookup"], systems=[], max_new_tokens=6, repeats=2)
    records = answer_prompts(plan, tiny_engine, prompts, lambda: rounds.append(len(asked)))
    systems = ["none", "prompt_lookup"]
    turns = [(system, prompt) for _ in range(2) for prompt in prompts for system in systems]
    assert asked == turns
    assert warmed == systems
    assert reset == systems * 4
    assert rounds == [2, 4, 6, 8]
    assert [(r.system, r.turns[0].prompt_ids) for r in records] == turns
    assert [r.key for r in records][:4] == [(n, system, 0) for n in (0, 1) for system in systems]
    for record in records:
        expected = tiny_engine.generate(record.turns[0].prompt_ids, 6).token_ids
        assert record.turns[0].token_ids == expected
        assert record.seconds("wall") > record.seconds("prefill") > 0


@pytest.mark.slow
def test_systems_take_turns_and_none_always_goes_first(make: Make) -> None:
    order = [(repeat, question, system) for question, system, repeat in keys(make(repeats=2).run())]
    names = ["none", "prompt_lookup", "lookahead"]
    rounds = [order[start : start + 3] for start in range(0, 12, 3)]
    assert [(r[0][0], r[0][1]) for r in rounds] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [[system for _, _, system in r] for r in rounds] == [
        names,
        [*names[1:], names[0]],
        [*names[1:], names[0]],
        [*names[2:], *names[:2]],
    ]


# ------------------------------------------------------------------------------------------------------------ resuming


class Killed(BaseException):
    pass


def kill_after(count: int) -> Callable[[str, int], None]:
    left = [count]

    def on_system(label: str, answers: int) -> None:
        left[0] -= answers
        if left[0] < 0:
            raise Killed

    return on_system


@pytest.mark.slow
def test_a_killed_run_goes_on_without_losing_or_redoing_an_answer(make: Make) -> None:
    with pytest.raises(Killed):
        make(kill_after(4), repeats=2).run()
    folder = RunFolder(make(repeats=2).folder.path)
    first = folder.answers.read_bytes()
    assert len(keys(folder)) == 4
    folder.answers.write_bytes(first + first[:100])  # as a kill in the middle of a line leaves it
    assert len(folder.records()) == 4
    again = make(repeats=2)
    assert (again.resumed, len(again.todo)) == (4, 8)
    again.run()
    assert folder.answers.read_bytes().startswith(first)
    assert len(keys(folder)) == len(set(keys(folder))) == 12
    assert len(folder.manifest()["runs"]) == 2
    done = make(repeats=2)
    assert done.todo == []
    done.run()
    assert len(keys(folder)) == 12


@pytest.mark.slow
def test_two_runs_in_one_folder_are_refused(make: Make) -> None:
    runner = make()
    with runner.folder.writing(), pytest.raises(ConfigError, match="another run is writing to"):
        runner.run()
    runner.run()


@pytest.mark.slow
def test_a_finished_run_may_grow_but_not_change(make: Make) -> None:
    make(drafters=["none"]).run()
    assert len(make(repeats=2).run().records()) == 2 * 3 * 2
    with pytest.raises(ConfigError, match=r"is of a run with plan\.max_new_tokens 12, this one has 13"):
        make(max_new_tokens=13)
    with pytest.raises(ConfigError, match="is of a run with lookahead"):
        make(drafters=["none", {"name": "lookahead", "window": 7}])


@pytest.mark.slow
def test_an_option_younger_than_the_run_stood_at_its_default(make: Make) -> None:
    folder = make(drafters=["none"]).run()
    manifest = folder.manifest()
    del manifest["plan"]["execution"]
    folder.write_manifest(manifest)
    assert not make(drafters=["none"]).todo
    with pytest.raises(ConfigError, match=r"is of a run with plan\.execution 'auto', this one has 'modules'"):
        make(drafters=["none"], execution="modules")


@pytest.mark.few(1)
@pytest.mark.parametrize("execution", ["modules", "fused"])
def test_the_plan_says_what_runs_the_layers(execution: str) -> None:
    engine = load(Plan(execution=execution))
    assert engine.target.options["runner"] == execution


@pytest.mark.slow
def test_threads_are_one_for_tiny_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for plan in (Plan(), Plan(threads=3), Plan(model=str(embedded_model()))):
        load(plan)
    assert threads == [1, 3]


@pytest.mark.slow
def test_a_broken_line_in_the_middle_is_named(make: Make) -> None:
    folder = make(drafters=["none"]).run()
    lines = folder.answers.read_text().splitlines()
    folder.answers.write_text(lines[0][:50] + "\n" + lines[1] + "\n")
    with pytest.raises(ConfigError, match="line 1: no answer record"):
        folder.records()


# ------------------------------------------------------------------------------------------------------------- batches

SYSTEMS = ["transformers", "transformers_lookup"]
LABELS = ["none", "none@2", "prompt_lookup", "prompt_lookup@2", "transformers", "transformers@2", "transformers_lookup"]


def texts(folder: RunFolder) -> dict[str, dict[int | str, list[list[int]]]]:
    """System -> question -> the tokens of its turns."""
    found: dict[str, dict[int | str, list[list[int]]]] = {}
    for record in folder.records():
        found.setdefault(record.system, {})[record.question_id] = [turn.token_ids for turn in record.turns]
    return found


@pytest.mark.slow
def test_several_at_once_write_what_one_by_one_writes(
    make: Make, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []

    def forward(target: Any, steps: Sequence[Any]) -> Any:
        widths.append(len(steps))
        return run_steps(target, steps)

    monkeypatch.setattr("specdec.engine.decoding.run_steps", forward)
    runner = make(batch=[2], drafters=["none", "prompt_lookup"], systems=SYSTEMS)
    assert [system.label for system in runner.systems] == LABELS
    assert runner.manifest["left_out"] == {"transformers_lookup@2": "transformers_lookup answers one prompt at a time"}
    folder = runner.run()
    assert set(widths) == {2}  # one alone is joined with nothing
    assert list(map(len, texts(folder).values())) == [2] * 7
    plain = texts(folder)["none"]
    assert [len(turns) for turns in plain.values()] == [1, 2]
    assert all(found == plain for found in texts(folder).values())
    found = judge(tiny_engine, folder, folder.records())
    assert {label: str(verdict) for label, verdict in found.systems.items()} == dict.fromkeys(LABELS, "identical")
    for record in folder.records():
        for turn in record.turns:
            assert len(turn.times) == len(turn.accept_lengths)
            assert turn.times == sorted(turn.times)


def test_shares_of_the_clock_add_up_and_a_prompt_s_begins_when_it_is_taken(
    tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks once whenever it is read."""
    now = [0.0]

    def tick() -> float:
        now[0] += 1
        return now[0]

    plan = Plan(systems=[], policy="off")
    system = Drafted("none", tiny_engine, {"name": "none"}, plan)
    prompts = [tiny_engine.encode(text) for text in ("import os\nimport", "x = [1, 2, 3, 4]\ny = ", "def f(a):\n")]
    monkeypatch.setattr("specdec.bench.systems.perf_counter", tick)
    outputs = [output for output in system.answer_batch(prompts, 4, 2) if isinstance(output, Output)]
    assert len(outputs) == 3
    assert sum(output.seconds["wall"] for output in outputs) == pytest.approx(now[0] - 1)
    # Taken on ticks 2 and 3; each of their four steps ticks; then the third one is taken, and has its steps alone.
    assert [output.times for output in outputs] == [[2, 4, 6, 8], [2, 4, 6, 8], [1, 2, 3, 4]]


def test_a_rival_does_not_look_at_its_padding(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of each row is as long as its prompt, and the prompt stands under it."""
    system: Any = make(drafters=["none"], systems=["transformers"]).systems[-1].system
    generate, prompts, seen = system._model.generate, [[5, 6], [7, 8, 9, 10], [11]], []

    def noted(ids: torch.Tensor, *, attention_mask: torch.Tensor, **options: Any) -> Any:
        seen.extend(row[mask.bool()].tolist() for row, mask in zip(ids, attention_mask, strict=True))
        return generate(ids, attention_mask=attention_mask, **options)

    monkeypatch.setattr(system._model, "generate", noted)
    assert [len(output.token_ids) for output in system.answer_batch(prompts, 2, 2)] == [2, 2, 2]
    assert seen == prompts


@pytest.mark.slow
def test_a_text_that_ends_early_is_cut_from_its_batch(
    make: Make, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = texts(make(drafters=["none"]).run())["none"][1][0]
    monkeypatch.setattr(tiny_engine.target, "eos_ids", frozenset(first[3:4]))
    runner = make(drafters=["none"], systems=["transformers"], batch=[2], repeats=2)
    records = [record for record in runner.run().records() if record.repeat == 1]
    ended = {r.system: r.turns[0] for r in records if r.question_id == 1}
    assert list(ended) == ["none@2", "transformers", "transformers@2", "none"]
    assert {tuple(turn.token_ids) for turn in ended.values()} == {tuple(first[: first.index(first[3]) + 1])}
    assert {turn.finish_reason for turn in ended.values()} == {"eos"}
    assert all(len(turn.times) == len(turn.token_ids) for turn in ended.values())


@pytest.mark.slow
def test_a_prompt_that_fails_leaves_its_batch_whole(
    make: Make, questions: str, tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"question_id": 3, "category": "long", "turns": ["x = 1\n" * 3000], "format": "plain"}
    with open(questions, "a") as file:
        file.write(json.dumps(long) + "\n")
    whole = texts(make(drafters=["none"]).run())["none"]
    begin = Engine.begin

    def failing(self: Engine, request: Any) -> Any:
        if request.prompt == tiny_engine.encode(QUESTIONS[0]["turns"][0]):
            raise RuntimeError("no")
        return begin(self, request)

    monkeypatch.setattr(Engine, "begin", failing)
    records = {r.question_id: r for r in make(drafters=["none"], batch=[2]).run().records() if r.system == "none@2"}
    assert [(known, record.error and record.error.split(":")[0]) for known, record in records.items()] == [
        (1, "RuntimeError"),
        (2, None),
        (3, "PromptError"),
    ]
    assert [turn.token_ids for turn in records[2].turns] == whole[2]


@pytest.mark.slow
def test_a_killed_run_of_batches_goes_on_lot_by_lot(make: Make, questions: str) -> None:
    with open(questions, "w") as file:
        for number in range(16):
            asked = {"question_id": number, "category": "qa", "turns": [f"import {number}\n"], "format": "plain"}
            file.write(json.dumps(asked) + "\n")
    options: dict[str, Any] = {"drafters": ["none"], "max_new_tokens": 3, "batch": [2]}
    with pytest.raises(Killed):
        make(kill_after(24), **options).run()
    folder = RunFolder(make(**options).folder.path)
    first = folder.answers.read_bytes()
    assert len(first.splitlines()) == 24  # one lot of eight by both, and the second by the batch, which goes first
    folder.answers.write_bytes(b"".join(first.splitlines(keepends=True)[:-1]))  # a batch was cut short
    again = make(**options)
    assert again.resumed == 16
    assert [(len(asked), system.label) for _, asked, system in again.todo] == [(8, "none@2"), *[(1, "none")] * 8]
    again.run()
    found = texts(folder)
    assert found["none"] == found["none@2"]
    assert sorted(found["none"]) == list(range(16))
    more = make(**{**options, "batch": [2, 4]})  # what is done stays, though lots are larger now
    assert [(len(asked), system.label) for _, asked, system in more.todo] == [(16, "none@4")]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_drafter_that_is_kept_is_kept_for_one_size(make: Make, persistent: bool) -> None:
    systems: list[Any] = make(drafters=["prompt_lookup"], batch=[2], persistent=persistent).systems
    drafters = {id(entrant.system._engine.drafter) for entrant in systems}
    assert len(drafters) == (4 if persistent else 2)


def test_a_batch_needs_as_many_questions(make: Make) -> None:
    with pytest.raises(ConfigError, match="a batch of 1000000000 is never full with 2 questions; lower --batch"):
        make(batch=[10**9])


# ------------------------------------------------------------------------------------------------------------ failures


@pytest.mark.slow
def test_a_question_that_fails_is_recorded_and_the_run_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, tiny_engine: Engine
) -> None:
    answer = Drafted.answer

    def sometimes(self: Drafted, prompt: list[int], budget: int) -> Output:
        if self.label == "lookahead" and len(prompt) > 20:
            raise RuntimeError("out of\nmemory")
        return answer(self, prompt, budget)

    monkeypatch.setattr(Drafted, "answer", sometimes)
    folder = make().run()
    failed = [record for record in folder.records() if record.error is not None]
    assert [(r.system, r.question_id, r.error, r.turns) for r in failed] == [
        ("lookahead", 2, "RuntimeError: out of memory", [])
    ]
    found = audit(folder.records(), folder.manifest()["systems"], tiny_engine.target, SamplingParams())
    assert (found.systems["lookahead"].answers, found.systems["lookahead"].failed) == (1, 1)


@pytest.mark.slow
def test_too_long_a_prompt_fails_its_question_alone(make: Make, questions: str) -> None:
    long = {"question_id": 3, "category": "long", "turns": ["x = 1\n" * 3000], "format": "plain"}
    with open(questions, "a") as file:
        file.write(json.dumps(long) + "\n")
    records = make(drafters=["none"]).run().records()
    assert [record.error is None for record in records] == [True, True, False]
    assert "the model's context holds 2048" in str(records[2].error)


@pytest.mark.slow
@pytest.mark.parametrize(("persistent", "objects"), [(True, 1), (False, 2)])
def test_drafters_are_built_anew_for_each_question_unless_persistent(
    make: Make, monkeypatch: pytest.MonkeyPatch, persistent: bool, objects: int
) -> None:
    drafters: list[Any] = []
    answer = Drafted.answer

    def note(self: Drafted, prompt: list[int], budget: int) -> Output:
        drafters.append(self._engine.drafter)
        return answer(self, prompt, budget)

    monkeypatch.setattr(Drafted, "answer", note)
    make(drafters=["none"], persistent=persistent).run()
    assert len(drafters) == 3  # the two turns of question 2 share one in any case
    assert len(set(map(id, drafters))) == objects


@pytest.fixture
def stranger(tiny_engine: Engine, tmp_path: Path) -> str:
    """A model with the embedded one's vocabulary, and no idea of Python."""
    new_model("llama", vocab_size=tiny_engine.target.vocab_size).save_pretrained(tmp_path / "stranger")
    return str(tmp_path / "stranger")


@pytest.mark.slow
@pytest.mark.parametrize("helpful", [True, False])
def test_transformers_assisted_generation(make: Make, tiny_engine: Engine, stranger: str, helpful: bool) -> None:
    """With the model itself as its assistant, and with one that is never right: the same text, in few steps or many."""
    assistant = str(embedded_model()) if helpful else stranger
    system = {"name": "transformers_assisted", "assistant": assistant}
    folder = make(drafters=["none"], systems=[system]).run()
    found = audit(folder.records(), folder.manifest()["systems"], tiny_engine.target, SamplingParams())
    assert str(found.systems["transformers_assisted"]) == "identical"
    turns = [turn for record in folder.records() if record.system == "transformers_assisted" for turn in record.turns]
    assert all(sum(turn.accept_lengths) == len(turn.token_ids) == 12 for turn in turns)
    if helpful:
        assert max(len(turn.accept_lengths) for turn in turns) < 6
    else:
        assert min(len(turn.accept_lengths) for turn in turns) > 6


def test_assistants_that_cannot_be(make: Make, tmp_path: Path) -> None:
    def run_with(path: Path) -> None:
        make(systems=[{"name": "transformers_assisted", "assistant": str(path)}])

    with pytest.raises(CheckpointError, match=r"cannot load the assistant .*absent.* of transformers_assisted"):
        run_with(tmp_path / "absent")
    new_model("llama").save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"has 32 tokens, and the model \d+; give one with the same tokenizer"):
        run_with(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes(b"none")
    with pytest.raises(CheckpointError, match="cannot load the assistant"):
        run_with(tmp_path / "other")


def test_unknown_names(make: Make) -> None:
    with pytest.raises(ConfigError, match="unknown drafter 'lokahead'; did you mean 'lookahead'"):
        make(drafters=["lokahead"])
    with pytest.raises(ConfigError, match="unknown system 'transformer'; did you mean 'transformers'"):
        make(systems=["transformer"])
    with pytest.raises(ConfigError, match="unknown option of transformers_lookup 'tokens'"):
        make(systems=[{"name": "transformers_lookup", "tokens": 3}])
    with pytest.raises(ConfigError, match=r"needs a draft model; give --set transformers_assisted\.assistant=PATH"):
        make(systems=["transformers_assisted"])
    with pytest.raises(ConfigError, match="unknown category 'test'; did you mean 'tests'"):
        make(categories=["test"])


def test_a_drafter_with_weights_by_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LABEL=NAME:FOLDER``, alone or beside others; a folder may have any characters."""
    wanted = [
        {"label": "mine", "name": "kangaroo", "adapter": "a, b:c=d"},
        {"label": "heads", "name": "medusa", "heads": "m"},
        {"label": "e", "name": "eagle", "head": "h"},
        {"label": "plain", "name": "lookahead"},
    ]
    texts = ["mine=kangaroo:a, b:c=d", "heads=medusa:m", "e=eagle:h", "plain=lookahead"]
    assert [labelled(text) for text in texts] == wanted
    for text, message in (
        ("kangaroo:x", "takes LABEL=NAME:FOLDER"),
        ("a=kangaro:x", "did you mean 'kangaroo'"),
        ("a=jacobi:x", "jacobi takes no folder of weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            labelled(text)
    asked = list[Any]()
    monkeypatch.setattr("specdec.bench.cli._run", lambda plan, *_: asked.append(plan.drafters) or sys.exit(0))
    for more in ([], ["--drafters", "none,jacobi"]):
        CliRunner().invoke(build(), ["bench", "--drafter", texts[0], "--out", str(tmp_path), *more])
    assert asked == [[wanted[0]], ["none", "jacobi", wanted[0]]]


@pytest.mark.slow
def test_all_takes_what_builds_and_says_what_it_left_out(make: Make) -> None:
    runner = make(drafters=["all"])
    labels = [system.label for system in runner.systems]
    assert labels[0] == "none"
    assert {"jacobi", "lookahead", "prompt_lookup"} <= set(labels)
    assert not set(labels) & set(runner.manifest["left_out"])


def test_a_third_party_system_is_found(
    make: Make, tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "sample_system-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample-system\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[specdec.bench_systems]\nbeams = specdec.bench.transformers_systems:TransformersSystem\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    runner = make(systems=["beams"])
    assert isinstance(runner.systems[-1].system, TransformersSystem)
    assert runner.systems[-1].label == "beams"


# ----------------------------------------------------------------------------------------------------------- the audit


def tampered(records: Sequence[Record], system: str, change: Callable[[list[int]], list[int]]) -> list[Record]:
    """The records with the first turn's tokens of one system changed."""

    def changed(record: Record) -> Record:
        first, *rest = record.turns
        turn = dataclasses.replace(first, token_ids=change(first.token_ids))
        return dataclasses.replace(record, turns=[turn, *rest])

    return [changed(record) if record.system == system else record for record in records]


def judge(engine: Engine, folder: RunFolder, records: Sequence[Record], **sampling: Any) -> Audit:
    return audit(records, folder.manifest()["systems"], engine.target, SamplingParams(**sampling))


def test_a_wrong_token_is_a_bug_of_the_system(answered: RunFolder, tiny_engine: Engine) -> None:
    wrong = tampered(answered.records(), "lookahead", lambda tokens: [*tokens[:5], tokens[5] ^ 1, *tokens[6:]])
    found = judge(tiny_engine, answered, wrong)
    assert not found.passed
    divergence = found.systems["lookahead"].divergences[0]
    assert (divergence.position, divergence.culprit, divergence.verdict) == (5, "lookahead", "BUG")
    assert divergence.gap is not None
    assert divergence.bound is not None
    assert divergence.gap > divergence.bound
    assert divergence.dtype == "float64"
    assert str(found.systems["lookahead"]) == "0 of 2 identical, 2 BUGS"
    assert "BUG: lookahead, question 1, turn 1, repeat 1: token 5 is" in str(divergence)
    assert str(found.systems["prompt_lookup"]) == "identical"


@pytest.mark.slow
def test_the_fresh_logits_tell_who_is_wrong(answered: RunFolder, tiny_engine: Engine) -> None:
    """Where plain decoding itself is off, all others differ from it, and it is the culprit."""
    wrong = tampered(answered.records(), "none", lambda tokens: [*tokens[:5], tokens[5] ^ 1, *tokens[6:]])
    found = judge(tiny_engine, answered, wrong)
    assert {bug.culprit for bug in found.bugs} == {"none"}
    assert {bug.system for bug in found.bugs} == {"lookahead", "prompt_lookup"}


@pytest.mark.slow
def test_a_rival_that_is_wrong_does_not_fail_the_run(make: Make, tiny_engine: Engine) -> None:
    folder = make(systems=["transformers_lookup"]).run()
    wrong = tampered(folder.records(), "transformers_lookup", lambda tokens: [tokens[0] ^ 1, *tokens[1:]])
    found = judge(tiny_engine, folder, wrong)
    assert found.systems["transformers_lookup"].bugs == 2
    assert found.passed


@pytest.mark.slow
def test_a_text_that_ends_early_or_late_is_a_bug(answered: RunFolder, tiny_engine: Engine) -> None:
    for change in (lambda tokens: tokens[:7], lambda tokens: [*tokens, 1, 1]):
        found = judge(tiny_engine, answered, tampered(answered.records(), "lookahead", change))
        assert not found.passed
        assert "one text ends at token" in str(found.bugs[0])


def test_a_tie_is_rounding(tiny_engine: Engine) -> None:
    """Two tokens with one embedding row have one logit; either is right, and a third is not."""
    target = tiny_engine.target
    prompt = tiny_engine.encode("import os\nimport")
    weight = live(target).get_output_embeddings().weight
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        best = int(live(target)(ids, attention_mask=torch.ones_like(ids)).logits[0, -1].argmax())
    twin, third = 4000, 4001
    former = weight.data[twin].clone()
    try:
        weight.data[twin] = weight.data[best]
        verdicts = {token: audit_of_two(tiny_engine, prompt, best, token) for token in (twin, third)}
    finally:
        weight.data[twin] = former
    assert str(verdicts[twin].systems["fast"]) == "0 of 1 identical, 1 apart by rounding"
    assert verdicts[twin].passed
    assert not verdicts[third].passed


def audit_of_two(engine: Engine, prompt: list[int], plain: int, fast: int) -> Audit:
    def answer(system: str, token: int) -> Record:
        turn = AnsweredTurn(
            prompt_ids=prompt, token_ids=[token], text="", finish_reason="length", accept_lengths=[1], rows=[1],
            seconds={"wall": 1.0}, retokenized=1,
        )  # fmt: skip
        return Record(question_id=1, category="x", system=system, repeat=0, turns=[turn])

    about = {"ours": True, "lossy": False, "comparable": True}
    records = [answer("none", plain), answer("fast", fast)]
    return audit(records, {"none": about, "fast": about}, engine.target, SamplingParams())


def test_bounds_grow_with_the_dtype_and_the_logits() -> None:
    bounds = [rounding_bound(dtype, 20.0) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert bounds == sorted(bounds)
    assert bounds[0] < 1e-3
    assert 0.1 < bounds[2] < 1
    assert rounding_bound(torch.float32, 40.0) == 2 * bounds[0]


@pytest.mark.slow
def test_sampled_text_is_compared_at_its_seed(make: Make, tiny_engine: Engine) -> None:
    folder = make(temperature=0.8, seed=3, systems=["transformers"]).run()
    found = judge(tiny_engine, folder, folder.records(), temperature=0.8, seed=3, acceptance="match")
    assert [str(found.systems[s]) for s in ("none", "prompt_lookup", "lookahead")] == ["identical"] * 3
    assert str(found.systems["transformers"]) == "not compared: its random numbers are its own"
    wrong = tampered(folder.records(), "lookahead", lambda tokens: [*tokens[:3], tokens[3] ^ 1, *tokens[4:]])
    assert not judge(tiny_engine, folder, wrong, temperature=0.8, seed=3, acceptance="match").passed


@pytest.mark.slow
def test_the_seed_s_noise_decides_who_is_wrong(make: Make, tiny_engine: Engine) -> None:
    """Where the draw was not the likeliest token, the likeliest one is the wrong one."""
    options: dict[str, Any] = {"temperature": 1.5, "seed": 1, "acceptance": "match"}
    folder = make(**options).run()
    target = tiny_engine.target
    turn = next(record for record in folder.records() if record.system == "none").turns[0]
    ids = torch.tensor([[*turn.prompt_ids, *turn.token_ids]])
    with torch.inference_mode():
        best = live(target)(ids, attention_mask=torch.ones_like(ids)).logits[0].argmax(-1).tolist()
    top_k = best[len(turn.prompt_ids) - 1 : -1]
    place = next(n for n, (drawn, top) in enumerate(zip(turn.token_ids, top_k, strict=True)) if drawn != top)
    changed = [*turn.token_ids[:place], top_k[place], *turn.token_ids[place + 1 :]]
    wrong = tampered(folder.records(), "lookahead", lambda tokens: changed if tokens == turn.token_ids else tokens)
    (bug,) = judge(tiny_engine, folder, wrong, **options).bugs
    assert (bug.culprit, bug.position, bug.expected) == ("lookahead", place, turn.token_ids[place])


@pytest.mark.slow
def test_lossy_answers_are_labelled_and_not_failed(make: Make, tiny_engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "acceptance": "typical", "allow_lossy": True}
    folder = make(**options).run()
    assert folder.manifest()["systems"]["lookahead"]["lossy"]
    found = judge(tiny_engine, folder, folder.records(), **options)
    assert found.passed
    assert str(found.systems["lookahead"]).startswith("not compared: lossy")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("temperature", "acceptance", "compared"),
    [(0.0, "auto", "both"), (1.0, "match", "both"), (1.0, "auto", "lookahead"), (1.0, "reject", "neither")],
)
def test_only_tokens_of_a_seed_are_compared(
    tiny_engine: Engine, temperature: float, acceptance: str, compared: str
) -> None:
    """A drafter that draws from a q is verified by rejection, which keeps the distribution alone."""
    plan = Plan(drafters=["lookahead", "draft_model"], systems=[], temperature=temperature, acceptance=acceptance)
    found = {entrant.label: entrant.system.comparable for entrant in make_systems(plan, tiny_engine)[0]}
    assert found["lookahead"] is (compared != "neither")
    assert found["draft_model"] is (compared == "both")


@pytest.mark.slow
def test_missing_answers_are_an_error(make: Make, tiny_engine: Engine) -> None:
    folder = make().run()
    lines = folder.answers.read_text().splitlines(keepends=True)
    folder.answers.write_text("".join(line for line in lines if '"system":"lookahead"' not in line))
    with pytest.raises(ConfigError, match="2 of 2 answers of 'lookahead' are missing, such as question"):
        judge(tiny_engine, folder, folder.records())
    with pytest.raises(ConfigError, match="the run has no answers, so there is nothing to compare"):
        judge(tiny_engine, folder, [])


def test_an_audit_rests_on_answers(answered: RunFolder, tiny_engine: Engine) -> None:
    """A drafter all of whose answers failed has not passed, and of failures alone nothing is known."""
    found = judge(tiny_engine, answered, [failed(one, one.system == "lookahead") for one in answered.records()])
    assert not found.passed
    assert str(found.systems["lookahead"]) == "nothing compared, 2 failed"
    assert str(found) == "2 answers were compared with plain decoding's, 2 failed"
    nothing = judge(tiny_engine, answered, [failed(one, True) for one in answered.records()])
    assert not nothing.passed
    assert nothing.compared == 0
    half = judge(tiny_engine, answered, [failed(one, one.question_id == 1) for one in answered.records()])
    assert half.passed
    assert str(half.systems["lookahead"]) == "1 of 1 identical, 1 failed"


def failed(record: Record, fails: bool) -> Record:
    return replace(record, turns=[], error="RuntimeError: no") if fails else record


@pytest.mark.slow
def test_what_was_there_before_is_not_swept_while_systems_answer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look through all objects of models and libraries would be counted to who answers just then."""
    run, frozen = make(drafters=["none"]), list[int]()
    answer = run._answer
    monkeypatch.setattr(gc, "unfreeze", UNFREEZE)
    gc.unfreeze()

    def noted(*args: Any) -> Any:
        frozen.append(gc.get_freeze_count())
        return answer(*args)

    monkeypatch.setattr(run, "_answer", noted)
    run.run()
    assert min(frozen) > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as a program may have done before
    make(drafters=["none"]).run()
    assert gc.get_freeze_count() > 10_000
    gc.unfreeze()
    gc.freeze()
