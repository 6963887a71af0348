"""Rotary frequencies that depend on the text's length: decoded up to where they begin to."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import Engine, TransformersTarget
from specdec.errors import PromptError
from tests.models import new_model, prompt_of, reference

SHORT = 24
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SHORT}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": SHORT}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "rope", "context"),
    [
        ("gemma3", {"full_attention": LONG, "sliding_attention": PLAIN}, SHORT),
        ("gemma3", {"full_attention": PLAIN, "sliding_attention": DYNAMIC}, SHORT),
        ("gemma3", {"full_attention": PLAIN, "sliding_attention": PLAIN}, 256),
        ("phi3", {**LONG, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, SHORT),
        ("llama", DYNAMIC, SHORT),
        ("llama", PLAIN, 256),
    ],
)
def test_the_context_ends_where_frequencies_change(family: str, rope: dict[str, Any], context: int) -> None:
    model, prompt = new_model(family, rope_parameters=rope, original_max_position_embeddings=SHORT), prompt_of(11)
    engine = Engine(TransformersTarget(model), drafter="jacobi")
    assert engine.target.context_length == context
    out = engine.generate(prompt, 30)
    assert out.token_ids == reference(model, prompt, min(30, context - 11))
    assert out.finish_reason == ("context" if context == SHORT else "length")
    if context == SHORT:
        with pytest.raises(PromptError, match=f"has 40 tokens, and the model's context holds {SHORT}"):
            engine.generate(prompt_of(40), 4)
