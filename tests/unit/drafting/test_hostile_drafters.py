"""Drafters with weights and sizes that make no sense: refused, or the text is plain decoding's all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.draft_model import DraftModel, DraftModelConfig
from specdec import Engine, SamplingParams
from specdec.errors import CheckpointError
from specdec.models.transformers_target import TransformersTarget
from tests.models import greedy, new_model, prompt_of, random_adapter, random_heads, target_of

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


@pytest.mark.few(1)
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


@pytest.mark.few(1)
@pytest.mark.parametrize(("scale", "tree"), [(1e10, None), (1e30, None), (1e37, [[0], [1], [0, 0]])])
def test_heads_that_overflow_change_no_token(tmp_path: Path, scale: float, tree: list[list[int]] | None) -> None:
    """Alone and as a part, of all heads or of all but the first, which may guess on."""
    target, prompts = target_of("llama", torch.float32), [PROMPT, PROMPT[:3]]
    samplings = SamplingParams(), SamplingParams(temperature=1.0, acceptance="match")
    plain = [[Engine(target).generate(own, 8, params).token_ids for own in prompts] for params in samplings]
    for first in (0, 1):
        random_heads(target, tmp_path, own_head=True)
        path = tmp_path / "medusa_lm_head.safetensors"
        save_file({k: t * scale if int(k[0]) >= first else t for k, t in load_file(path).items()}, path)
        medusa = {"name": "medusa", "heads": str(tmp_path), "tree": tree}
        for drafter in (medusa, {"name": "union", "parts": [medusa, "prompt_lookup"]}):
            engine = Engine(target, None, drafter)
            for params, expected in zip(samplings, plain, strict=True):
                assert [one.token_ids for one in engine.generate_batch(prompts, 8, params)] == expected
            params = SamplingParams(temperature=1.0, acceptance="reject")
            assert len(engine.generate(PROMPT, 8, params).token_ids) == 8


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("widths", [[], [2, 2]])
def test_a_draft_model_that_says_no_number_changes_no_token(value: float, widths: list[int]) -> None:
    """After one token, or after all of them: then it has drafted nothing."""
    model, params = TransformersTarget(new_model("llama", seed=2)), SamplingParams(temperature=1.0, acceptance="match")
    plain = [Engine(target_of("llama")).generate(PROMPT, NEW, own).token_ids for own in (None, params)]
    engine = Engine(target_of("llama"), None, DraftModel(DraftModelConfig(widths=widths, min_confidence=0.0), model))
    weights = model.model.get_input_embeddings().weight
    for rows in (slice(plain[0][5], plain[0][5] + 1), slice(None)):
        with torch.no_grad():
            weights[rows] = value
        found = [engine.generate(PROMPT, NEW, own) for own in (None, params, SamplingParams(temperature=1.0))]
        assert [one.token_ids for one in found[:2]] == plain
        assert len(found[2].token_ids) == NEW
        assert all(max(one.stats.rows) == 1 for one in found) == (rows == slice(None))
