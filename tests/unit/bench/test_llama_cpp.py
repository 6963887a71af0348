"""llama.cpp's server as a rival: what it refuses, and where the package is at hand, what it answers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import Engine
from specdec.bench.llama_cpp import LlamaCpp, write_gguf
from specdec.bench.plan import Plan
from specdec.errors import ConfigError
from tests.models import target_of


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
        ({"file": file, "quantise": 4}, Plan(), "quantise"),
        ({"file": tmp_path / "no.gguf"}, Plan(), "it must be a GGUF file"),
        ({"file": file, "draft": "no.gguf"}, Plan(), "draft of llama_cpp is 'no.gguf'"),
        ({"file": file, "spec_type": "ngram-mud"}, Plan(), "did you mean 'ngram-mod'"),
    ):
        with pytest.raises(ConfigError, match=why):
            LlamaCpp.build("llama_cpp", engine, plan, options)


def test_the_package_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "some.gguf").touch()
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ConfigError, match="pip install xllamacpp"):
        LlamaCpp.build("llama_cpp", Engine.from_pretrained("tiny"), Plan(), {"file": file})


def test_tokens_and_steps(tmp_path: Path, package: None) -> None:
    (file := tmp_path / "some.gguf").touch()
    engine = Engine.from_pretrained("tiny")
    options = {"file": str(file), "spec_type": "ngram-mod", "draft": str(file)}
    system = LlamaCpp.build("llama_cpp", engine, Plan(), options)
    found = system.answer([5, 6, 7, 8, 9], 10)
    assert found.token_ids == [5, 6, 7, 8, min(engine.target.eos_ids)]
    assert found.accept_lengths == [2, 2, 1]
    assert (found.finish_reason, system.lossy, system.comparable) == ("eos", True, False)
    made = Server.made
    assert (made.model.path, made.speculative.types) == (str(file), [5])
    assert made.speculative.draft.mparams.path == str(file)


def test_a_model_that_is_no_llama_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        write_gguf(Engine(target_of("qwen2")), tmp_path / "model.gguf")


@pytest.mark.slow
def test_answers_as_plain_decoding_does() -> None:
    """The same weights in float32: on a text without ties, the same tokens, with a draft and without."""
    pytest.importorskip("xllamacpp")
    engine = Engine.from_pretrained("tiny")
    prompt = engine.encode("import unittest\n\n\nclass ")
    expected = engine.generate(prompt, 48)
    for kind in ("none", "ngram-simple"):
        found = LlamaCpp.build("llama_cpp", engine, Plan(), {"spec_type": kind}).answer(prompt, 48)
        assert found.token_ids == expected.token_ids
        assert sum(found.accept_lengths) == 48
