"""Static shapes: compiled steps give the same text, and after a warm-up nothing is compiled again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from specdec import Engine, SamplingParams, TransformersTarget
from specdec.errors import ConfigError
from specdec.static import check_compiler
from tests import models

DRAFTERS: tuple[Any, ...] = ("none", "prompt_lookup", {"name": "lookahead", "window": 4, "ngram": 4, "guesses": 4})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_text_is_that_of_generate_and_nothing_is_compiled_twice(family: str, tmp_path: Path) -> None:
    """Counted by a backend that runs what it gets; kangaroo has entries, exits and taps of its own."""
    model, counter = models.new_model(family), CompileCounter()
    target = TransformersTarget(model, optimize="auto", compile=counter)
    drafters = [*DRAFTERS, models.settings_of("kangaroo", target, tmp_path)[0]]
    for prompt in (models.prompt_of(11), models.prompt_of(30)):
        expected = models.reference(model, prompt, 40)
        for drafter in drafters:
            assert Engine(target, drafter=drafter, max_rows=16).generate(prompt, 40).token_ids == expected
    assert target._static is not None
    warm = counter.frame_count
    assert warm == len(target._static._graphs)
    assert warm > len(drafters)  # else this shows nothing
    sampling = SamplingParams(temperature=1.0, seed=3, acceptance="match")
    texts = (models.prompt_of(17), 60), (models.prompt_of(30), 40)
    for _ in range(2):
        settled = counter.frame_count  # by the second round every size has been seen
        for drafter in drafters:
            for text in texts:
                plain = Engine(models.target_of(family)).generate(*text, sampling)
                assert (
                    Engine(target, drafter=drafter, max_rows=16).generate(*text, sampling).token_ids == plain.token_ids
                )
    assert counter.frame_count == settled == len(target._static._graphs)
    assert {key[0] for key in target._static._graphs} <= {1, 2, 4, 8, 16, 32}


@pytest.mark.slow
def test_the_compiler_s_graphs_are_right() -> None:
    """AOT autograd's functional graphs, as the default compiler gets them: the cache must still be written in place."""
    model, prompt = models.new_model("llama"), models.prompt_of(11)
    target = TransformersTarget(model, optimize="auto", compile="aot_eager")
    assert Engine(target, drafter="prompt_lookup").generate(prompt, 40).token_ids == models.reference(model, prompt, 40)


def test_a_model_with_layers_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="of Gemma2ForCausalLM's 3, 0 are lowered"):
        TransformersTarget(models.new_model("gemma2"), optimize="auto", compile="eager")
    with pytest.raises(ConfigError, match="of LlamaForCausalLM's 3, 0 are lowered: use optimize='auto'"):
        TransformersTarget(models.new_model("llama"), optimize="off", compile="eager")


def test_no_compiler_is_said_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none_found() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(ConfigError, match=r"compile=True needs a C\+\+ compiler, .* or leave compile off"):
        TransformersTarget(models.new_model("llama"), optimize="auto", compile=True)
    check_compiler("eager", torch.device("cpu"))
