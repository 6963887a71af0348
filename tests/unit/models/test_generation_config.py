"""A checkpoint's generation config: an engine says what it does not take of it; custom_generate takes it."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SuppressTokensLogitsProcessor

from specdec import Engine, SamplingParams, TransformersTarget, custom_generate
from specdec.errors import SpecdecWarning
from tests.models import live, new_model, prompt_of, reference

PROMPT, NEW = prompt_of(9), 20
PENALTY = {"repetition_penalty": 1.3, "suppress_tokens": [5, 6, 7, 8, 9, 10, 11, 12]}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 1.0}


def engine_of(**options: Any) -> Engine:
    model = new_model("llama")
    model.generation_config.update(**options)
    return Engine(TransformersTarget(model))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "sampling", "named"),
    [
        (PENALTY, None, "repetition_penalty=1.3, suppress_tokens=[5, 6, 7, 8, 9, 10, 11, 12]"),
        (PENALTY, SamplingParams(), "suppress_tokens=[5, 6, 7, 8, 9, 10, 11, 12]"),
        (SAMPLED, None, "do_sample=True, temperature=0.7, top_k=20"),
        ({"forced_bos_token_id": 0}, None, "forced_bos_token_id=0"),
        ({"forced_eos_token_id": 1}, None, "forced_eos_token_id=1"),
    ],
)
def test_what_is_not_taken_is_said(options: dict[str, Any], sampling: SamplingParams | None, named: str) -> None:
    engine = engine_of(**options)
    message = rf"config of LlamaForCausalLM sets {re.escape(named)}, which an engine does not take: .*custom_generate"
    plain = Engine(TransformersTarget(new_model("llama"))).generate(PROMPT, NEW).token_ids
    with pytest.warns(SpecdecWarning, match=message) as caught:
        assert engine.generate(PROMPT, NEW, sampling).token_ids == plain
    assert caught[0].filename == __file__  # the line that called


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, None),
        (SAMPLED, SamplingParams(temperature=0.5)),
        ({"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.0}, None),  # say nothing without do_sample
        ({"min_length": 0, "num_beams": 1, "suppress_tokens": []}, None),
    ],
)
def test_what_says_nothing_is_not_warned_of(options: dict[str, Any], sampling: SamplingParams | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(engine_of(**options).generate(PROMPT, 4, sampling).token_ids) == 4


def test_given_as_processors_it_is_generate_s_text() -> None:
    """The remedies that the warning names."""
    engine = engine_of(**PENALTY)
    model, ids = live(engine.target), torch.tensor([PROMPT])
    expected = reference(model, PROMPT, NEW)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
    out = model.generate(ids, custom_generate=custom_generate, **options)
    assert out[0, len(PROMPT) :].tolist() == expected
    model.generation_config.suppress_tokens = model.generation_config.repetition_penalty = None
    assert engine.generate(PROMPT, NEW).token_ids != expected
    processors = [RepetitionPenaltyLogitsProcessor(1.3), SuppressTokensLogitsProcessor(PENALTY["suppress_tokens"])]
    assert engine.generate(PROMPT, NEW, logits_processor=processors).token_ids == expected
