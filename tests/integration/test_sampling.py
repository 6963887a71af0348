"""Sampled text is a property of model and seed: every drafter draws plain sampling's own tokens, under every processor.

The noise is keyed by position, so this can be shown by equality, token for token, in float64. Drafts that carry a q are
accepted by rejection unless told otherwise, and are checked by distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from specdec import Draft, Engine, SamplingParams
from specdec.costs.curve import roofline
from specdec.drafting.registry import make_drafter
from tests.fakes import Oracle, Spy
from tests.joint import assert_joint, five_token_target, joint_of
from tests.models import VOCAB, prompt_of, settings_of, target_of
from tests.tiers import FEW, once

SAMPLED = ("llama", "mistral", "gemma3")  # gemma3 is run by its own modules, the others fused
PROMPT = prompt_of(7)
NEW = 32


class Rhyme(LogitsProcessor):
    """A user's own processor, which depends on the whole prefix: forbids one token and favours another."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        total = int(input_ids.sum())
        scores[:, total % VOCAB] = -torch.inf  # in place, as transformers' own do now and then
        scores[:, (total * 7 + input_ids.shape[1]) % VOCAB] += 3.0
        return scores


Build = Callable[[], list[Any]]
CASES: dict[str, tuple[dict[str, Any], Build]] = {
    "plain": ({}, list),
    "cold": ({"temperature": 0.3}, list),
    "top_k": ({"top_k": 5}, list),
    "top_p": ({"top_p": 0.7, "temperature": 0.8}, list),
    "min_p": ({"min_p": 0.1}, list),
    "penalty": ({"repetition_penalty": 1.4, "top_k": 8, "top_p": 0.9}, list),
    "bad_words": ({}, lambda: [NoBadWordsLogitsProcessor([[26], [18], [20, 27], [0, 20]], eos_token_id=[1])]),
    "no_repeat": ({"temperature": 0.5}, lambda: [NoRepeatNGramLogitsProcessor(2)]),
    "own": ({"temperature": 0.7}, lambda: [Rhyme()]),
    "greedy_own": ({"temperature": 0.0, "repetition_penalty": 1.2}, lambda: [Rhyme()]),
}


def sampling(case: str, seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **CASES[case][0], "seed": seed, "acceptance": "match", **changes})


@cache
def plain(family: str, case: str, seed: int) -> list[int]:
    """Plain sampling's text, drawn once."""
    out = Engine(target_of(family)).generate(PROMPT, NEW, sampling(case, seed), logits_processor=CASES[case][1]())
    return out.token_ids


@pytest.mark.few(4)
@pytest.mark.parametrize(("family", "case"), once(SAMPLED, CASES))
def test_trees_around_the_truth(family: str, case: str) -> None:
    """As for greedy decoding, a drafter that knows the answer: long blocks, so long prefixes for the processors."""
    for seed in (0, 7, -1):
        expected = plain(family, case, seed)
        oracle = Oracle([*PROMPT, *expected], VOCAB)
        engine = Engine(target_of(family), None, oracle, max_rows=24)
        out = engine.generate(PROMPT, NEW, sampling(case, seed), logits_processor=CASES[case][1]())
        assert out.token_ids == expected
        assert out.stats.tokens_per_step > 2


def test_seeds_and_cases_differ() -> None:
    """Otherwise equality would be cheap."""
    texts = [tuple(plain("llama", case, seed)) for case in CASES for seed in (0, 1)]
    greedy_ones = 1  # greedy decoding has no seed
    assert len(set(texts)) == len(texts) - greedy_ones


def test_same_seed_same_text() -> None:
    assert plain("llama", "plain", 3) == plain.__wrapped__("llama", "plain", 3)


@pytest.mark.slow
def test_low_temperature_accepts_drafts() -> None:
    """The registered drafters' equality above is not for want of accepted drafts."""
    for drafter in ("prompt_lookup", "lookahead"):
        stats = [
            Engine(target_of(family), None, drafter).generate(PROMPT, NEW, sampling("cold", seed)).stats
            for family in SAMPLED
            for seed in range(4)
        ]
        assert sum(s.new_tokens for s in stats) / sum(s.steps for s in stats) > 1.05


# Rejection itself is shown by test_verify.py and test_distribution.py; here, that drafters give it what it needs.


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("drafter", "acceptance"),
    [
        ("draft_model", "auto"),
        ("token_recycling", "reject"),
        *((name, "reject") for name in FEW),
    ],
)
def test_other_lossless_rules(drafter: str, acceptance: str, tmp_path: Path) -> None:
    """They keep the distribution; ``auto`` takes ``reject`` for drafts with a q.

    By given costs: which drafts are made, and so which texts are drawn, must not depend on what a forward took here.
    """
    target, model = five_token_target()
    for settings in settings_of(drafter, target, tmp_path)[:2]:
        drafts: list[Draft] = []
        spy = Spy(make_drafter(settings, target), drafts.append)
        engine = Engine(target, None, spy, max_rows=24, costs=roofline())
        params = [SamplingParams(temperature=1.0, seed=seed, acceptance=acceptance) for seed in range(300)]
        prompt = [1, 2, 3, 1, 2]
        texts = [engine.generate(prompt, 3, p).token_ids for p in params[:20]]
        assert any(len(draft) > 1 for draft in drafts) == (drafter not in ("none", "prediction"))  # nothing predicted
        texts += [one.token_ids for one in engine.generate_batch([prompt] * 280, 3, params[20:], batch=40)]
        assert_joint([text[:2] for text in texts], joint_of(model, prompt, 2))
