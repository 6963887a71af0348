"""llama.cpp as a rival: what it refuses, and where the package is at hand, what it answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec import Engine
from specdec.bench.llama_cpp import LlamaCpp, write_gguf
from specdec.bench.plan import Plan
from specdec.errors import ConfigError
from tests.models import target_of


def test_sampled_text_and_unknown_options_are_refused() -> None:
    engine = Engine.from_pretrained("tiny")
    with pytest.raises(ConfigError, match="greedy text; leave it out of --systems"):
        LlamaCpp.build("llama_cpp", engine, Plan(temperature=0.8), {})
    with pytest.raises(ConfigError, match="quantise"):
        LlamaCpp.build("llama_cpp", engine, Plan(), {"quantise": 4})


def test_a_model_that_is_no_llama_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        write_gguf(Engine(target_of("qwen2")), tmp_path / "model.gguf")


def test_answers_as_plain_decoding_does() -> None:
    """Same weights in float32: on a text without ties, the same tokens, with n-gram lookup and without."""
    pytest.importorskip("llama_cpp")
    engine = Engine.from_pretrained("tiny")
    prompt = engine.encode("import unittest\n\n\nclass ")
    expected = engine.generate(prompt, 48)
    for options in ({}, {"lookup": 5}):
        found = LlamaCpp.build("llama_cpp", engine, Plan(), options).answer(prompt, 48)
        assert found.token_ids == expected.token_ids
        assert sum(found.accept_lengths) == 48
    assert len(found.accept_lengths) < 48
