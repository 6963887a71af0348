"""End to end: sampled drafts through the engine on a five-token model, three tokens against the model's enumeration."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

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
    drafter: Drawing | str,
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


@pytest.mark.parametrize(
    ("widths", "chosen"),
    [
        pytest.param((1, 1), False, id="chain", marks=pytest.mark.slow),
        pytest.param((2, 2), False, id="tree"),
        pytest.param((3, 1), True, id="mixed", marks=pytest.mark.slow),
    ],
)
def test_drawn_drafts_keep_the_joint_distribution(widths: Sequence[int], chosen: bool) -> None:
    drafter = Drawing(bigrams(), widths, chosen=chosen)
    assert_joint(sample(drafter, "auto"), joint_of(five_token_target()[1], PROMPT, 3))


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
