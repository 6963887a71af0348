"""What a generation says beside its text: log-probabilities, and acceptance under vLLM's names."""

from __future__ import annotations

import pytest
import torch

from specdec import Engine, SamplingParams, Statistics
from specdec.errors import ConfigError
from tests.models import model_of, prompt_of, target_of


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "lookahead"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_logprobs_are_a_plain_forward_s(drafter: str, temperature: float) -> None:
    """Before processors: of the model's own forward over the whole text, for one prompt and for several."""
    engine = Engine(target_of("qwen2", execution="modules"), None, drafter, max_rows=16)
    prompts, sampling = [prompt_of(7), prompt_of(12)], SamplingParams(temperature=temperature, repetition_penalty=1.2)
    alone = engine.generate(prompts[0], 20, sampling, logprobs=3)
    found = engine.generate_batch(prompts, 20, sampling, logprobs=3)
    assert found[0].token_ids == alone.token_ids
    for prompt, one in zip([prompts[0], *prompts], [alone, *found], strict=True):
        ids = torch.tensor([[*prompt, *one.token_ids]])
        with torch.inference_mode():
            logits = model_of("qwen2")(ids).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1)
        assert one.logprobs is not None
        assert [said.token_id for said in one.logprobs] == one.token_ids
        for said, row in zip(one.logprobs, expected, strict=True):
            assert said.logprob == pytest.approx(float(row[said.token_id]), abs=1e-9)
            best = row.topk(3)
            assert [token for token, _ in said.top] == best.indices.tolist()
            assert [value for _, value in said.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_logprobs_are_kept_on_request() -> None:
    engine = Engine(target_of("llama", execution="modules"))
    assert engine.generate(prompt_of(3), 4).logprobs is None
    only = engine.generate(prompt_of(3), 4, logprobs=0).logprobs
    assert only is not None
    assert [said.top for said in only] == [()] * 4
    with pytest.raises(ConfigError, match="logprobs is -1"):
        engine.generate(prompt_of(3), 4, logprobs=-1)


def test_acceptance_under_vllm_s_names() -> None:
    """Two plain steps, and drafts of 3, 3 and 5 tokens of which 0, 2 and 3 were accepted."""
    stats = Statistics(acceptance_lengths=[1, 1, 3, 1, 4], rows=[1, 4, 4, 1, 6])
    assert stats.acceptance() == {
        "steps": 5,
        "num_drafts": 3,
        "num_draft_tokens": 11,
        "num_accepted_tokens": 5,
        "num_accepted_tokens_per_pos": [2, 2, 1],
        "mean_acceptance_length": 1 + 5 / 3,
        "acceptance_length_histogram": {1: 3, 3: 1, 4: 1},
    }
    assert Statistics().acceptance()["mean_acceptance_length"] == 1.0
