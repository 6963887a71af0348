"""Drafters with weights and sizes that make no sense: refused, or the text is plain decoding's all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine, SamplingParams
from specdec.errors import CheckpointError
from tests.models import greedy, prompt_of, random_adapter, target_of

PROMPT, NEW = prompt_of(9), 24


def adapter_of(tmp_path: Path, value: float, variant: str) -> dict[str, Any]:
    """An adapter with one weight of this value in each matrix."""
    random_adapter(target_of("llama"), tmp_path, variant=variant, branch=3, eta=0.5)
    tensors = load_file(tmp_path / "model.safetensors")
    for tensor in tensors.values():
        tensor.view(-1)[0] = value
    save_file(tensors, tmp_path / "model.safetensors")
    return {"name": "kangaroo", "adapter": str(tmp_path)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_adapter_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    drafter = adapter_of(tmp_path, value, "attention")
    with pytest.raises(CheckpointError, match=r"in '.*' holds NaN or infinity; train it anew"):
        Engine(target_of("llama"), None, drafter)


@pytest.mark.parametrize("value", [1e30, 3e38])
@pytest.mark.parametrize("variant", ["attention", "layer", "head"])
def test_an_adapter_that_overflows_drafts_nothing(tmp_path: Path, variant: str, value: float) -> None:
    engine = Engine(target_of("llama", torch.float64), None, adapter_of(tmp_path, value, variant))
    assert engine.generate(PROMPT, NEW).token_ids == greedy("llama", PROMPT, NEW)
    for acceptance in ("match", "reject"):
        params = SamplingParams(temperature=1.0, acceptance=acceptance)
        out = engine.generate(PROMPT, NEW, params).token_ids
        assert len(out) == NEW
        if acceptance == "match":
            assert out == Engine(target_of("llama", torch.float64)).generate(PROMPT, NEW, params).token_ids


@pytest.mark.parametrize("size", ["window", "ngram", "guesses"])
def test_lookahead_of_any_size_ends(size: str) -> None:
    engine = Engine(target_of("llama"), None, {"name": "lookahead", size: 10**9})
    assert engine.generate(PROMPT, NEW).token_ids == greedy("llama", PROMPT, NEW)
