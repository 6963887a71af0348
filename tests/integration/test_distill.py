"""Self-distillation: the answers are the target's own, a killed run ends in the same bytes, and training reads it."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from specdec import Engine, SamplingParams
from specdec.cli.main import build, main
from specdec.engine.questions import Question
from specdec.engine.text_stream import continuation
from specdec.errors import CheckpointError, ConfigError, NumericalError
from specdec.results import Generation, Statistics
from tests.fakes import Reciter
from tests.small_tokenizers import ids_of, tokenizer_of
from training.data import TextConfig, read_samples
from training.distill import SELF, Distilled, distill, own_prompts, prompts_of, talk
from training.skips import Skips

TEXTS = ("import os\n", "def f(x):\n", "class A:\n", "for i in ")
PROMPTS = [Question(id=n, category="code", turns=(text,), format="plain") for n, text in enumerate(TEXTS)]
SAMPLED = SamplingParams(temperature=1.0, seed=5)


def made(
    engine: Engine, out: Path, prompts: Any = PROMPTS, sampling: SamplingParams = SAMPLED, batch: int = 1
) -> Distilled:
    return distill(engine, prompts, out, max_new_tokens=6, sampling=sampling, batch=batch, run={"model": "tiny"})


class Killed(BaseException):
    """A kill, as far as a test can have one."""


def killed_after(count: int, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on ``begin`` counts its calls, and the one after ``count`` of them is the last."""
    calls: list[Any] = []
    begin = engine.begin

    def counting(request: Any) -> Any:
        if len(calls) == count:
            raise Killed
        calls.append(request)
        return begin(request)

    monkeypatch.setattr(engine, "begin", counting)
    return calls


@pytest.mark.slow
def test_answers_are_the_targets_own(tiny_engine: Engine, tmp_path: Path) -> None:
    found = made(tiny_engine.with_drafter("prompt_lookup"), tmp_path / "own.json")
    records = json.loads((tmp_path / "own.json").read_text())
    assert found.records == len(records) == len(TEXTS)
    for number, (text, record) in enumerate(zip(TEXTS, records, strict=True)):
        sampling = SamplingParams(temperature=1.0, seed=5 + number)
        answer = tiny_engine.generate(text, 6, sampling).text
        assert record["conversations"] == [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]
    skips = Skips()
    samples = list(
        read_samples([str(tmp_path / "own.json")], tiny_engine.tokenizer, TextConfig(template="plain"), skips)
    )
    assert len(samples) == len(TEXTS)
    assert all(any(sample.trained) for sample in samples)


@pytest.mark.slow
def test_drafters_change_no_answer(tiny_engine: Engine, tmp_path: Path) -> None:
    """Nor does one that draws its drafts, which under ``auto`` would be verified by rejection."""
    files = []
    for name in ("none", "kangaroo"):
        files.append(tmp_path / f"{name}.JsonL")
        made(tiny_engine.with_drafter(name), files[-1])
    assert files[0].read_bytes() == files[1].read_bytes()
    assert [json.loads(line)["id"] for line in files[0].read_text().splitlines()] == ["0", "1", "2", "3"]


@pytest.fixture
def ending(tiny_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose texts end at a fifth of all tokens, so that talks go on and own questions are some."""
    monkeypatch.setattr(tiny_engine.target, "eos_ids", frozenset(range(0, tiny_engine.target.vocab_size, 5)))
    return Engine(tiny_engine.target, tiny_engine.tokenizer)


def talks() -> list[Question]:
    """Of one to four turns, and one that is too long behind its first answer."""
    said = [tuple(f"# {word} {turn}" for turn in range(1 + number % 4)) for number, word in enumerate("abcdefg")]
    said.append(("# short", "x " * 3000))
    return [Question(id=n, category="talk", turns=turns) for n, turns in enumerate(said)]


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [talks(), own_prompts(12)], ids=["talks", "own"])
def test_the_file_is_the_same_for_any_batch(ending: Engine, tmp_path: Path, prompts: list[Question]) -> None:
    """With a kill in the middle, and another batch to go on with."""
    files = [tmp_path / f"{batch}.jsonl" for batch in (1, 3)]
    spent = {made(ending, file, prompts, batch=batch).new_tokens for file, batch in zip(files, (1, 3), strict=True)}
    text = files[0].read_text()
    turns = [len(json.loads(line)["conversations"]) for line in text.splitlines()]
    assert len(turns) > 2
    assert max(turns) > 2 or prompts[0].category == SELF
    assert files[1].read_text() == text
    assert len(spent) == 1
    with pytest.MonkeyPatch.context() as patch:
        killed_after(9, ending, patch)
        with pytest.raises(Killed):
            made(ending, tmp_path / "resumed.jsonl", prompts, batch=4)
    done = len((tmp_path / "resumed.jsonl.partial").read_text().splitlines()) - 1
    assert 0 < done < len(prompts)
    made(ending, tmp_path / "resumed.jsonl", prompts, batch=2)
    assert (tmp_path / "resumed.jsonl").read_text() == text


@pytest.mark.slow
def test_a_killed_run_goes_on(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    made(tiny_engine, whole)
    engine = tiny_engine.with_drafter("none")
    with monkeypatch.context() as patch:
        killed_after(2, engine, patch)
        with pytest.raises(Killed):
            made(engine, out)
    partial = tmp_path / "out.json.partial"
    assert not out.exists()
    with partial.open("a") as file:
        file.write('{"record": {"id": "2", "conv')  # cut short in mid-line
    calls = killed_after(9, engine, monkeypatch)
    assert made(engine, out).records == 4
    assert len(calls) == 2  # the first two answers were there
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "whole.json"]


def test_another_runs_file_is_refused(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    engine = tiny_engine.with_drafter("none")
    killed_after(1, engine, monkeypatch)
    with pytest.raises(Killed):
        made(engine, out)
    with pytest.raises(ConfigError, match=r"of a run with temperature 1\.0, this one has 0\.5; give the same options"):
        made(engine, out, sampling=SamplingParams(temperature=0.5, seed=5))
    with pytest.raises(ConfigError, match="of a run with asked"):
        made(engine, out, [*PROMPTS[:3], Question(id=3, category="code", turns=("while ",), format="plain")])
    out.write_text("[]")
    with pytest.raises(ConfigError, match="exists; delete it, or give another --out"):
        made(engine, out)


def test_what_cannot_be_answered_is_counted(tiny_engine: Engine, tmp_path: Path) -> None:
    long = Question(id=1, category="code", turns=("x " * 3000,), format="plain")
    found = made(tiny_engine, tmp_path / "out.json", [PROMPTS[0], long])
    assert (found.records, dict(found.skipped)) == (1, {"prompt longer than the context": 1})


def test_an_answer_that_fails_is_told(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(request: Any) -> Any:
        raise NumericalError("the logits are no numbers")

    monkeypatch.setattr(tiny_engine, "begin", begin)
    with pytest.raises(NumericalError, match="no numbers"):
        made(tiny_engine, tmp_path / "out.json")


def test_two_runs_into_one_file_are_refused(tiny_engine: Engine, tmp_path: Path) -> None:
    """At once, and one behind the other; nothing is left but the file."""
    out, refused = tmp_path / "out.json", list[str]()

    class Noting(list[Any]):
        """Prompts: while they are read, another run tries to answer them."""

        def __getitem__(self, number: Any) -> Any:
            with pytest.raises(ConfigError) as caught:
                made(tiny_engine, out)
            refused.append(str(caught.value))
            return super().__getitem__(number)

    made(tiny_engine, out, Noting(PROMPTS))
    assert set(refused) == {f"another run is answering into {str(out)!r}; wait for it, stop it, or give another --out"}
    assert os.listdir(tmp_path) == ["out.json"]
    assert len(json.loads(out.read_text())) == len(TEXTS)


def test_a_disk_that_refuses_is_named(tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file' is a file; give another --out"):
        made(tiny_engine, tmp_path / "file" / "out.json")

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("specdec.settings.unfinished.append_lines", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*the same command goes on where it was"):
        made(tiny_engine, tmp_path / "out.json")


def test_later_turns_follow_the_targets_answers(tiny_engine: Engine, tmp_path: Path) -> None:
    """A talk goes on only behind an answer that ended by itself."""
    target = tiny_engine.target
    talk = Question(id=0, category="talk", turns=("# one", "# two"))
    made(tiny_engine, tmp_path / "cut.json", [talk])
    [record] = json.loads((tmp_path / "cut.json").read_text())
    assert len(record["conversations"]) == 2
    first = tiny_engine.generate([{"role": "user", "content": "# one"}], 6, SAMPLED)
    ends = Engine(target, tiny_engine.tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "eos_ids", frozenset(first.token_ids))  # now the first token ends it
        made(ends, tmp_path / "whole.json", [talk])
        [record] = json.loads((tmp_path / "whole.json").read_text())
        said = [turn["value"] for turn in record["conversations"]]
        messages = [{"role": "user", "content": "# one"}, {"role": "assistant", "content": said[1]}]
        second = tiny_engine.generate([*messages, {"role": "user", "content": "# two"}], 6, SAMPLED)
    assert said == ["# one", said[1], "# two", second.text]


def test_prompts_of_every_kind(tiny_engine: Engine, tmp_path: Path) -> None:
    tokenizer = tiny_engine.tokenizer
    talk = {"conversations": [{"from": n, "value": v} for n, v in (("human", "a"), ("gpt", "b"), ("human", "c"))]}
    (tmp_path / "talks.json").write_text(json.dumps([talk, {"conversations": [{"from": "gpt", "value": "x"}]}, 7]))
    (tmp_path / "questions.jsonl").write_text('{"question_id": 81, "category": "qa", "turns": ["d", "e"]}\n')
    (tmp_path / "code.txt").write_text("a = 1\n" * 40)
    talks, questions, code = (str(tmp_path / name) for name in ("talks.json", "questions.jsonl", "code.txt"))
    assert [prompt.turns for prompt in prompts_of([talks, questions], tokenizer)] == [("a",), ("d",)]
    both = prompts_of([talks, questions], tokenizer, turns="all")
    assert [(prompt.id, prompt.turns) for prompt in both] == [(0, ("a", "c")), (1, ("d", "e"))]
    pieces = prompts_of([code], tokenizer, prompt_tokens=32)
    text = "".join(piece.turns[0] for piece in pieces)
    assert ("a = 1\n" * 40).startswith(text)
    assert all(len(tokenizer(piece.turns[0], add_special_tokens=False)["input_ids"]) >= 32 for piece in pieces)
    assert len(pieces) > 2
    with pytest.raises(ConfigError, match=r"mix texts to be continued with questions"):
        prompts_of([talks, code], tokenizer)
    with pytest.raises(ConfigError, match="turns is 'last'; it must be one of first, all"):
        prompts_of([talks], tokenizer, turns="last")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("empty.txt", "", "not one prompt"),
        ("talk.json", '[{"conversations": [{"from": "gpt", "value": "x"}]}]', "not one prompt"),
        ("broken.json", '[{"conversations"', "is no JSON"),
        ("odd.jsonl", '{"answer": 3}', "none of the keys turns, prompt and question"),
        ("none.txt", None, "cannot read"),
    ],
)
def test_sources_without_prompts(tiny_engine: Engine, tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        prompts_of([str(tmp_path / name)], tiny_engine.tokenizer)


@pytest.mark.slow
def test_the_command_s_policy_and_stop_strings_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_engine: Engine
) -> None:
    """What the command offers it does: it once took both and dropped them."""
    (tmp_path / "code.txt").write_text("def f(x):\n    return x\n" * 20)
    out, policies = tmp_path / "own.json", list[Any]()
    load = Engine.from_pretrained

    def noting(*arguments: Any, **options: Any) -> Engine:
        policies.append(options["policy"])
        return load(*arguments, **options)

    monkeypatch.setattr(Engine, "from_pretrained", noting)
    command = ["distill-data", str(tmp_path / "code.txt"), "--prompts", "1", "--prompt-tokens", "32"]
    command += ["--max-new-tokens", "24", "--out"]
    assert main([*command, str(out), "--policy", "off"]) == 0
    [record] = json.loads(out.read_text())
    whole = record["conversations"][1]["value"]
    stop = whole[len(whole) // 2 :][:3]
    cut = tmp_path / "cut.json"
    assert main([*command, str(cut), "--stop", stop, "--drafter", "prompt_lookup", "--policy", "acceptance"]) == 0
    [record] = json.loads(cut.read_text())
    assert record["conversations"][1]["value"] == whole[: whole.index(stop)] != whole
    assert len(set(policies)) == len(policies) == 2


def test_another_runs_stop_strings_are_another_run(tiny_engine: Engine, tmp_path: Path) -> None:
    engine = tiny_engine.with_drafter("none")
    with pytest.MonkeyPatch.context() as patch:
        killed_after(1, engine, patch)
        with pytest.raises(Killed):
            made(engine, tmp_path / "out.json")
    with pytest.raises(ConfigError, match=r"of a run with stop None, this one has \['x'\]"):
        distill(
            engine, PROMPTS, tmp_path / "out.json", max_new_tokens=6, sampling=SAMPLED, stop="x", run={"model": "tiny"}
        )


@pytest.fixture
def _fresh_accelerator() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_accelerator")
def test_training_takes_what_the_command_wrote(tmp_path: Path) -> None:
    (tmp_path / "code.txt").write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(60)))
    out, run = str(tmp_path / "own.json"), CliRunner()
    command = ["distill-data", str(tmp_path / "code.txt"), "--out", out, "--prompts", "3", "--prompt-tokens", "32"]
    said = run.invoke(build(), [*command, "--max-new-tokens", "8"], catch_exceptions=False)
    assert "3 conversations; train with --data" in said.output
    assert said.output.strip().endswith("--set text.template=plain")
    options = ["text.template=plain", "text.length=32", "loop.steps=1", "loop.batch=1", "evaluation.new=4"]
    settings = [part for option in options for part in ("--set", option)]
    said = run.invoke(
        build(),
        ["train", "medusa", "--data", out, "--out", str(tmp_path / "run"), "--wandb", "off", *settings],
        catch_exceptions=False,
    )
    assert "best at step 1" in said.output


@pytest.mark.parametrize(
    ("kind", "form", "written"),
    [
        ("byte fallback", "vicuna", "b c"),
        ("byte fallback", "chat", "b c"),
        ("byte fallback", "plain", " b c"),
        ("byte-level BPE", "vicuna", "b c"),
        ("byte-level BPE", "chat", " b c"),  # the model's own, as the template writes none
        ("byte-level BPE", "plain", " b c"),
    ],
)
def test_the_space_before_an_answer_is_written_once(kind: str, form: str, written: str) -> None:
    """A record and the next turn's prompt hold an answer as the model goes on: plain texts with the space that joins
    them, turns without, where Vicuna's way or SentencePiece's writes one.
    """
    tokenizer = copy.deepcopy(tokenizer_of(kind))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = Engine(Reciter(lambda text: 0, vocab_size=len(tokenizer)), tokenizer)
    tokens = ids_of(kind, "b c") if kind == "byte fallback" else ids_of(kind, " b c")
    said = talk(engine, Question(id=0, category="x", turns=("a", "d")), form, 6, 0, SAMPLED, {})
    first = next(said)
    assert continuation(tokenizer, engine.encode(first.prompt), tokens) == " b c"
    second = said.send(Generation(" b c", tokens, "eos", Statistics(), []))
    answer = {"role": "assistant", "content": written}
    assert answer in second.prompt if form == "chat" else written in second.prompt
    assert f"{'ASSISTANT:' if form == 'vicuna' else ''}  " not in str(second.prompt)
    with pytest.raises(StopIteration) as end:
        said.send(Generation(" b c", tokens, "eos", Statistics(), []))
    assert [turn["value"] for turn in end.value.value["record"]["conversations"]] == ["a", written, "d", written]


class TestOwnQuestions:
    """The source ``self``: the target writes a user's turn, then answers it."""

    def test_a_question_is_written_where_a_user_begins(self, tiny_engine: Engine) -> None:
        cold = SamplingParams(seed=7)
        said = talk(tiny_engine, own_prompts(1)[0], "auto", 6, 8, cold, {"stop": ["x"]})
        first = next(said)
        assert tiny_engine.tokenizer.decode(first.prompt) == "# User: "
        assert first.sampling == SamplingParams(temperature=1.0, seed=8)
        answer = said.send(Generation(" What is two?\n", [1], "eos", Statistics(), []))
        assert answer.prompt == [{"role": "user", "content": "What is two?"}]
        assert (answer.max_new_tokens, answer.sampling, answer.stop) == (6, SamplingParams(seed=8), ["x"])
        with pytest.raises(StopIteration) as end:
            said.send(Generation("It is two.", [1], "length", Statistics(), []))
        turns = [{"from": "human", "value": "What is two?"}, {"from": "gpt", "value": "It is two."}]
        assert end.value.value == {"record": {"id": "0", "source": "self", "conversations": turns}}

    def test_what_does_not_end_is_no_question(
        self, tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tiny_engine.target, "eos_ids", frozenset())
        found = made(tiny_engine, tmp_path / "own.json", own_prompts(1))
        assert (found.records, found.skipped.total(), found.new_tokens) == (0, 1, 100)

    def test_it_needs_a_chat_model(self, tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiny_engine.tokenizer, "chat_template", None)
        with pytest.raises(ConfigError, match="needs a chat template"):
            made(tiny_engine, tmp_path / "own.json", own_prompts(1))

    @pytest.mark.parametrize("words", [["self"], ["self", "stdlib", "--prompts", "2"]])
    def test_it_stands_alone_and_is_counted(self, words: list[str], tmp_path: Path) -> None:
        result = CliRunner().invoke(build(), ["distill-data", *words, "--out", str(tmp_path / "own.json")])
        assert "stands alone, with --prompts" in str(result.exception)
