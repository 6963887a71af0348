"""A file of prompts: answered in order, whole or not at all, and gone on with where it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine
from specdec.cli import main as cli
from specdec.cli.answer_file import answer, read_prompts
from specdec.engine.config import RunConfig
from specdec.errors import ConfigError, SpecdecWarning
from specdec.settings.files import held

TEXTS = ["import re\nimport", "def add(a, b):\n", "class A:\n", "for x in", "while True"]
RUN = RunConfig(max_new_tokens=6)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_answers_stand_in_order(tiny_engine: Engine, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert answer(tiny_engine, read_prompts(prompts), out, RUN, batch=2, progress=False) == 0
    assert [line["index"] for line in lines(out)] == list(range(5))
    assert [line["text"] for line in lines(out)] == [tiny_engine.generate(text, 6).text for text in TEXTS]
    assert [path.name for path in tmp_path.iterdir() if path.name != prompts.name] == ["out.jsonl"]
    busy = tmp_path / "busy.jsonl"
    with (
        held(tmp_path / ".busy.jsonl.lock", ""),
        pytest.raises(ConfigError, match=r"another run is answering into .*busy"),
    ):
        answer(tiny_engine, read_prompts(prompts), busy, RUN, batch=2, progress=False)
    with pytest.raises(ConfigError, match="exists; delete it"):
        answer(tiny_engine, read_prompts(prompts), out, RUN, batch=2, progress=False)


@pytest.mark.slow
def test_what_was_answered_is_not_asked_again(
    tiny_engine: Engine, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    generate_batch, asked = Engine.generate_batch, list[int]()

    def interrupted(self: Engine, given: Any, *rest: Any, on_done: Any, **options: Any) -> Any:
        def note(place: int, generation: Any) -> None:
            on_done(place, generation)
            if len(asked) == 1 and place == 1:
                raise KeyboardInterrupt

        asked.append(len(given))
        return generate_batch(self, given, *rest, on_done=note, **options)

    monkeypatch.setattr(Engine, "generate_batch", interrupted)
    kept = "2 of 5 answers are kept; the same command goes on from there"
    with pytest.warns(SpecdecWarning, match=kept), pytest.raises(KeyboardInterrupt):
        answer(tiny_engine, read_prompts(prompts), out, RUN, batch=2, progress=False)
    assert not out.exists()
    with partial.open("a", encoding="utf-8") as file:
        file.write('{"index": 4, "te')  # a kill in mid-line
    with pytest.raises(ConfigError, match="is of a run with max_new_tokens 6, this one has 7"):
        answer(tiny_engine, read_prompts(prompts), out, RunConfig(max_new_tokens=7), batch=2, progress=False)
    answer(tiny_engine, read_prompts(prompts), out, RUN, batch=2, progress=False)
    assert asked == [5, 3]
    assert [line["text"] for line in lines(out)] == [tiny_engine.generate(text, 6).text for text in TEXTS]


@pytest.mark.slow
@pytest.mark.filterwarnings("default::specdec.SpecdecWarning")
def test_command(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts.write_text(json.dumps(["x = ", {"prompt": "x " * 9000}]), encoding="utf-8")
    out = tmp_path / "out.jsonl"
    arguments = ["generate", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "3"]
    arguments += ["--execution", "fused"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr().err
    assert "warning: 1 of 2 prompts failed: 1 (the prompt has" in told
    assert "2 answers, 1 of them failures" in told
    assert [line["finish_reason"] for line in lines(out)] == ["length", "error"]
    assert lines(out)[1]["error"].startswith("PromptError: the prompt has 9002 tokens")
    for wrong in (["--prompts", "x"], ["--out", "x"], ["text", "--prompts", "x", "--out", "y"]):
        assert cli.main(["generate", *wrong]) == 2
        assert "go together" in capsys.readouterr().err


def test_records_that_are_no_prompts(prompts: Path) -> None:
    prompts.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 2 of .* is no prompt"):
        read_prompts(prompts)
    prompts.write_text('{"prompt": "a"}\n\n{"prompt": \n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r", line 3 is no JSON: Expecting value; it must hold a list of records"):
        read_prompts(prompts)
    prompts.write_text('[{"messages": [{"role": "user", "content": "hi"}]}]', encoding="utf-8")
    assert read_prompts(prompts) == [[{"role": "user", "content": "hi"}]]
