"""Texts beyond a model's original context: it takes its factors for these in all texts, where they were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine, TransformersTarget
from specdec.errors import ConfigError
from tests.decoders import reference_logits
from tests.gguf_families import CONTEXT, DIM, write_family
from tests.models import logits_of, new_model, prompt_of, reference

SHORT = 24
FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 5.0, 6.0, 7.0]}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SHORT, **FACTORS}


def saved(folder: Path, **rope: Any) -> Any:
    model = new_model("phi3", rope_parameters={**LONG, **rope}, original_max_position_embeddings=SHORT)
    model.save_pretrained(folder)
    return model


def test_all_texts_have_the_long_factors_where_more_is_asked_for(tmp_path: Path) -> None:
    model, prompt = saved(tmp_path), prompt_of(40)
    target = TransformersTarget.from_pretrained(tmp_path, dtype="float64", max_model_len=100)
    expected = reference_logits(model, prompt)  # transformers takes the long ones for a text so long
    torch.testing.assert_close(logits_of(target, prompt), expected, rtol=1e-6, atol=1e-6)
    plain = Engine(target, None).generate(prompt_of(11), 60).token_ids
    assert Engine(target, None, "jacobi").generate(prompt_of(11), 60).token_ids == plain
    always = new_model(
        "phi3", rope_parameters={**LONG, "short_factor": FACTORS["long_factor"]}, original_max_position_embeddings=SHORT
    )
    assert plain == reference(always, prompt_of(11), 60)
    assert plain[:13] != reference(model, prompt_of(11), 13)


@pytest.mark.parametrize("asked", [None, SHORT])
def test_up_to_the_original_context_it_has_the_short_ones(asked: int | None, tmp_path: Path) -> None:
    model, prompt = saved(tmp_path), prompt_of(11)
    engine = Engine(TransformersTarget.from_pretrained(tmp_path, dtype="float64", max_model_len=asked), None)
    assert engine.target.context_length == SHORT
    out = engine.generate(prompt, 30)
    assert (out.token_ids, out.finish_reason) == (reference(model, prompt, SHORT - 11), "context")


def test_a_file_s_long_factors(tmp_path: Path) -> None:
    factors = {"rope_factors_long.weight": (DIM // 2,), "rope_factors_short.weight": (DIM // 2,)}
    file = write_family(tmp_path / "a.gguf", "phi3", {"rope.scaling.original_context_length": SHORT}, factors)
    short, long = (TransformersTarget.from_pretrained(file, dtype="float64", max_model_len=n) for n in (None, CONTEXT))
    assert (short.context_length, long.context_length) == (SHORT, CONTEXT)
    apart = (logits_of(short, [3, 9, 4]) - logits_of(long, [3, 9, 4])).abs().max()
    assert apart > 1e-3


def test_a_context_is_no_longer_than_the_model_s(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(
        ConfigError, match=r"max_model_len is 300, and the model's context holds 256 tokens; give at most"
    ):
        Engine.from_pretrained(tmp_path, max_model_len=300)
    engine = Engine.from_pretrained("tiny", max_model_len=32)
    assert engine.generate([5] * 20, 60).finish_reason == "context"
