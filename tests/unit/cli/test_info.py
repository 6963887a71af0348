"""``specdec info``: what it is told of the engine and of the runners' times, as a table and as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.cli.main import main
from specdec.engine.config import ModelOptions

ABOUT = {
    "model": {"family": "Llama", "layers": 16, "note": None},
    "runner": {"name": "fused", "reason": "no C compiler", "caches": ["a", "b"], "sizes": {"x": 1}},
}
TIMES = {
    "modules": {"1": 0.004, "8": 0.006},
    "fused": {"1": 0.001, "8": 0.0015},
    "native": "no C compiler was found; install one",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine and the stopwatch were asked for; neither is a real one."""
    calls: list[Any] = []

    def load(options: ModelOptions) -> Any:
        calls.append(options)
        return SimpleNamespace(describe=lambda: ABOUT)

    def time_runners(model: str, **options: Any) -> Any:
        calls.append((model, options))
        return TIMES

    monkeypatch.setattr("specdec.engine.load.load", load)
    monkeypatch.setattr("specdec.cli.info.time_runners", time_runners)
    monkeypatch.setattr("specdec.engine.load.torch.set_num_threads", lambda threads: calls.append(threads))
    return calls


def test_a_row_for_every_value(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", "somewhere", "--execution", "fused"]) == 0
    assert asked == [ModelOptions(model="somewhere", execution="fused")]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["model", "family", "Llama"],
        ["layers", "16"],
        ["note", "none"],
        ["runner", "name", "fused"],
        ["reason", "no", "C", "compiler"],
        ["caches", "a,", "b"],
        ["sizes", "x", "1"],
    ]


def test_runners_side_by_side(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--time", "--dtype", "float32", "--threads", "2"]) == 0
    options = {
        "revision": None,
        "subfolder": None,
        "max_model_len": None,
        "dtype": "float32",
        "device": None,
        "device_map": None,
        "execution": "auto",
        "attention": "auto",
    }
    options["activations"] = "default"
    assert asked == [ModelOptions(dtype="float32", threads=2), 2, ("tiny", options)]
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.split()[:1] and line[0] != " "}
    assert rows["modules"] == ["4.00", "(4.00)", "6.00", "(4.00)"]
    assert rows["fused"] == ["1.00", "(1.00)", "1.50", "(1.00)"]
    assert "no C compiler was found; install one" in " ".join(shown.split())


def test_json(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ABOUT
    assert main(["info", "--json", "--time"]) == 0
    assert json.loads(capsys.readouterr().out) == {**ABOUT, "times": TIMES}
