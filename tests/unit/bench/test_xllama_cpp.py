"""llama.cpp's server as a rival: what it refuses, and where the package is at hand, what it answers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import Engine
from specdec.bench.plan import Plan
from specdec.bench.xllama_cpp import XLlamaCpp
from specdec.errors import ConfigError
from tests.quantised_files import quantised_file


class Parameters(SimpleNamespace):
    """Parts that are there when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Parameters())
        return vars(self)[name]


class Server:
    """One that accepted two drafted tokens of five."""

    made: Parameters

    def __init__(self, parameters: Parameters) -> None:
        Server.made = parameters

    def handle_completions(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokens = [{"id": token} for token in asked["prompt"][:4]]
        timings = {"prompt_ms": 1.0, "draft_n_accepted": 2}
        return {
            "choices": [{"logprobs": {"content": tokens}, "finish_reason": "stop"}],
            "timings": timings,
        }


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    types = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NONE=0, COMMON_SPECULATIVE_TYPE_NGRAM_MOD=5)
    stand_in = SimpleNamespace(CommonParams=Parameters, Server=Server, common_speculative_type=types)
    monkeypatch.setitem(sys.modules, "xllamacpp", stand_in)


def test_what_is_refused(tmp_path: Path, package: None) -> None:
    engine, file = Engine.from_pretrained("tiny"), tmp_path / "some.gguf"
    file.touch()
    for options, plan, why in (
        ({"file": file}, Plan(temperature=0.8), "greedy text"),
        ({}, Plan(), "file of xllamacpp is None; it must be a GGUF file"),
        ({"file": tmp_path / "no.gguf"}, Plan(), "it must be a GGUF file"),
        ({"file": file, "draft": "no.gguf"}, Plan(), "draft of xllamacpp is 'no.gguf'"),
        ({"file": file, "spec_type": "ngram-mud"}, Plan(), "did you mean 'ngram-mod'"),
    ):
        with pytest.raises(ConfigError, match=why):
            XLlamaCpp.build("xllamacpp", engine, plan, options)


def test_the_package_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "some.gguf").touch()
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ConfigError, match="pip install xllamacpp"):
        XLlamaCpp.build("xllamacpp", Engine.from_pretrained("tiny"), Plan(), {"file": file})


def test_tokens_and_steps(tmp_path: Path, package: None) -> None:
    (file := tmp_path / "some.gguf").touch()
    engine = Engine.from_pretrained("tiny")
    options = {"file": str(file), "spec_type": "ngram-mod", "draft": str(file)}
    system = XLlamaCpp.build("xllamacpp", engine, Plan(), options)
    found = system.answer([5, 6, 7, 8, 9], 10)
    assert found.token_ids == [5, 6, 7, 8, min(engine.target.eos_ids)]
    assert found.accept_lengths == [2, 2, 1]
    assert (found.finish_reason, system.lossy, system.comparable) == ("eos", True, False)
    made = Server.made
    assert (made.model.path, made.speculative.types) == (str(file), [5])
    assert made.speculative.draft.mparams.path == str(file)


def test_a_draft_changes_no_greedy_text(tmp_path: Path) -> None:
    """Where the package is at hand."""
    pytest.importorskip("xllamacpp")
    file, engine = quantised_file(tmp_path / "small.gguf", ("Q8_0",)), Engine.from_pretrained("tiny")
    prompt = [3, 9, 4, 3, 9, 4, 11, 3, 9]
    made = [
        XLlamaCpp.build("xllamacpp", engine, Plan(), {"file": file, "spec_type": kind})
        for kind in ("none", "ngram-mod")
    ]
    found = [system.answer(prompt, 16) for system in made]
    assert found[0].token_ids == found[1].token_ids
    assert sum(found[1].accept_lengths) == len(found[1].token_ids)
