"""End to end: sampled drafts through the engine on a five-token model, three tokens against the model's enumeration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from specdec import Engine, SamplingParams
from tests.fakes import Drawing, Spy
from tests.joint import assert_joint, five_token_target, joint_of

PROMPT = [4, 2, 0, 1]
TEXTS = 2000


def bigrams() -> torch.Tensor:
    """[5, 5] a drafter's smooth and wrong idea of the next token."""
    generator = torch.Generator().manual_seed(9)
    return torch.softmax(torch.randn(5, 5, generator=generator, dtype=torch.float64), -1)


def sample(
    drafter: Drawing | str | Mapping[str, Any],
    acceptance: str,
    *,
    temperature: float = 1.0,
    penalty: float = 1.0,
    prompt: Sequence[int] = PROMPT,
    texts: int = TEXTS,
) -> list[list[int]]:
    """A text for each seed. Many share a step, which takes a third of the time; some are asked for alone as well."""
    engine = Engine(five_token_target()[0], None, drafter, max_rows=16)
    changes = {"temperature": temperature, "acceptance": acceptance, "repetition_penalty": penalty}
    params = [SamplingParams(seed=seed, **changes) for seed in range(texts)]
    found = [one.token_ids for one in engine.generate_batch([prompt] * texts, 3, params, batch=64)]
    assert found[:20] == [engine.generate(prompt, 3, own).token_ids for own in params[:20]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "chosen"), [((1, 1), False), ((2, 2), False), ((3, 1), True)], ids=["chain", "tree", "mixed"]
)
def test_drawn_drafts_keep_the_joint_distribution(widths: Sequence[int], chosen: bool) -> None:
    drafter = Drawing(bigrams(), widths, chosen=chosen)
    assert_joint(sample(drafter, "auto"), joint_of(five_token_target()[1], PROMPT, 3))


def small_model(vocab_size: int, folder: Path) -> dict[str, Any]:
    """A draft model of another number of tokens, far from the target."""
    config = five_token_target()[1].config.__class__(
        **{**five_token_target()[1].config.to_dict(), "vocab_size": vocab_size, "num_hidden_layers": 1}
    )
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.4)
    model.save_pretrained(folder)
    return {"name": "draft_model", "model": str(folder), "min_confidence": 0.0, "check_tokenizer": False}


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "widths"), [(3, [2, 2]), (8, [])])
def test_a_draft_model_of_fewer_or_more_tokens_keeps_the_joint_distribution(
    vocab_size: int, widths: list[int], tmp_path: Path
) -> None:
    """What it lacks is never drafted and stays in the residual; what it alone has is no part of its q."""
    texts = sample({**small_model(vocab_size, tmp_path), "tokens": 2, "widths": widths}, "auto")
    assert_joint(texts, joint_of(five_token_target()[1], PROMPT, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["union", "auto"])
def test_merged_drafts_keep_the_joint_distribution(name: str, tmp_path: Path) -> None:
    """Each text with records of its own: nothing is chosen by a draw that then decides."""
    model = small_model(5, tmp_path)
    inner = {"name": "auto", "parts": ["jacobi", "lookahead"], "memory": 0.5}
    parts = ["prompt_lookup", {"name": "token_recycling", "persistent": True}, {**model, "widths": [2]}, inner]
    texts = sample({"name": name, "parts": parts, "memory": 0.5}, "reject")
    assert_joint(texts, joint_of(five_token_target()[1], PROMPT, 3))


@pytest.mark.slow
def test_temperature_reaches_the_rule() -> None:
    texts = sample(Drawing(bigrams(), (2, 1)), "reject", temperature=1.6, texts=1500)
    model = five_token_target()[1]
    assert_joint(texts, joint_of(model, PROMPT, 3, temperature=1.6))
    with pytest.raises(AssertionError, match="chi-square"):  # and the test sees such a difference
        assert_joint(texts, joint_of(model, PROMPT, 3, temperature=1.0))


@pytest.mark.slow
def test_processors_act_on_each_drafted_prefix() -> None:
    """A penalty on what the draft itself holds; rejected siblings must leave no trace."""
    texts = sample(Drawing(bigrams(), (2, 2)), "auto", penalty=3.0, prompt=PROMPT[:2])
    model = five_token_target()[1]
    penalty = RepetitionPenaltyLogitsProcessor(3.0)
    assert_joint(texts, joint_of(model, PROMPT[:2], 3, processors=[penalty]))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_joint(texts, joint_of(model, PROMPT[:2], 3))


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 1), (2, 2)])
def test_match_keeps_the_draws_of_plain_sampling(widths: Sequence[int]) -> None:
    plain = sample("none", "match", texts=300)
    assert sample(Drawing(bigrams(), widths), "match", texts=300) == plain


@pytest.mark.slow
def test_plain_sampling_has_the_models_distribution() -> None:
    assert_joint(sample("none", "auto"), joint_of(five_token_target()[1], PROMPT, 3))


def test_drawn_drafts_are_accepted_and_rejected() -> None:
    """Neither all nor none, or the rule was not at work."""
    lengths: list[int] = []
    drafter = Spy(Drawing(bigrams(), (1, 1, 1)), on_seen=lambda context, seen: lengths.append(len(seen.tokens)))
    for seed in range(60):
        Engine(five_token_target()[0], None, drafter).generate(PROMPT, 12, SamplingParams(temperature=1.0, seed=seed))
    assert set(lengths) == {1, 2, 3, 4}
