"""Many sequences at once: each text is the one that its prompt has by itself, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine, Generation, SamplingParams
from specdec.engine.requests import Request
from specdec.engine.scheduler import Handle, Scheduler
from specdec.native import library as native
from tests.fakes import Oracle
from tests.models import greedy, new_model, prompt_of, settings_of, target_for, target_of
from tests.tiers import each_once

needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler")
SIZES = {"max_rows": 24, "prefill_chunk": 16}
# Unequal prompts and budgets: they join and leave in mid-flight, and run past windows and round rings.
PROMPTS = [prompt_of(size) for size in (7, 1, 40, 2, 19)]
BUDGETS = [12, 24, 9, 1, 17]
BATCHES = ((2,), (1, 3, 7))
BATCHED = ("llama", "mistral", "qwen3", "gemma2", "gemma3")  # windows, and none; heads with norms, and soft caps
HOT = SamplingParams(temperature=0.8, seed=3)


def alone(engine: Engine, sampling: SamplingParams, **options: Any) -> list[Generation]:
    return [engine.generate(prompt, new, sampling, **options) for prompt, new in zip(PROMPTS, BUDGETS, strict=True)]


@cache
def plain(family: str) -> list[Generation]:
    """Greedy decoding's texts, made once."""
    return alone(Engine(target_of(family), **SIZES), SamplingParams())


def same(found: Sequence[Generation], expected: Sequence[Generation]) -> bool:
    return [(one.token_ids, one.finish_reason, one.text) for one in found] == [
        (one.token_ids, one.finish_reason, one.text) for one in expected
    ]


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("family", "dtype"), each_once(["qwen3", "mistral"], [torch.float32, torch.bfloat16]))
def test_native_rows_are_those_of_one_by_one_bit_for_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Half precision, where the best logits are often nearer than rounding: rounding itself does not change."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = target_for(new_model(family, dtype, **sizes), execution="native")
    kangaroos, models = (settings_of(name, target, tmp_path / name) for name in ("kangaroo", "draft_model"))
    others = [settings_of(name, target, tmp_path / name)[0] for name in ("none", "lookahead", "medusa")]
    for drafter in (*others, *kangaroos[:2], *models[:2]):
        engine = Engine(target, None, drafter, **SIZES)
        for sampling in (SamplingParams(), HOT):
            expected = alone(engine, sampling, logprobs=2)
            found = engine.generate_batch(PROMPTS, BUDGETS, sampling, batch=3, logprobs=2)
            assert same(found, expected), (drafter, sampling.temperature)
            assert [one.logprobs for one in found] == [one.logprobs for one in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float64),
        pytest.param("mistral", torch.bfloat16, marks=needs_compiler),
    ],
)
def test_drafters_in_one_batch_change_no_token(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Each request has a drafter of its own; they join and leave at random, greedy and drawn, some by force."""
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = target_of(family)
    if dtype != torch.float64:
        target = target_for(new_model(family, dtype, **sizes), execution="native")
    names = ("none", "auto", "prompt_lookup", "kangaroo", "medusa", "lookahead", "draft_model")
    drafters = [settings_of(name, target, tmp_path / name)[0] for name in names]
    engine = Engine(target, None, "token_recycling", policy="acceptance", **SIZES)
    scheduler, rng = Scheduler(engine, batch=4, step_rows=40), random.Random(7)
    requests = [
        Request(prompt, new, sampling, drafter=drafter, max_rows=rng.choice([None, 5, 24]))
        for drafter in (None, *drafters)
        for sampling in (SamplingParams(), HOT)
        for prompt, new in rng.sample([*zip(PROMPTS, BUDGETS, strict=True)], 2)
    ]
    rng.shuffle(requests)
    left, cancelled, found = requests.copy(), set[int](), dict[int, Generation]()
    while left or not scheduler.idle:
        for request in [left.pop() for _ in range(min(len(left), rng.randrange(3)))]:
            handle = scheduler.submit(request)
            if rng.random() < 0.1:
                cancelled.add(handle.index)
        for event in scheduler.step():
            if event.last:
                found[event.index] = event.generation()
            elif event.index in cancelled and event.step is not None and event.step.index == 2:
                scheduler.cancel(Handle(event.index))
    ends = [found[index].finish_reason for index in range(len(requests))]
    assert set(ends) == {"length", "cancelled"}
    for one, request in zip((found[index] for index in range(len(requests))), reversed(requests), strict=True):
        own = engine if request.drafter is None else engine.with_drafter(request.drafter)
        expected = own.start(request.prompt, request.max_new_tokens, request.sampling, max_rows=request.max_rows)
        with target.active():
            expected.prefill()
            while expected.finish_reason is None:
                expected.step()
        assert one.token_ids == expected.result().token_ids[: len(one.token_ids)], request
        assert one.finish_reason == "cancelled" or len(one.token_ids) == request.max_new_tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_trees_around_the_truth(family: str) -> None:
    """Scattered rows of many sequences accepted in one step, each gathered in its own cache."""
    target = target_of(family)
    truths = [greedy(family, prompt, 50) for prompt in PROMPTS]
    texts = [[*prompt, *truth] for prompt, truth in zip(PROMPTS, truths, strict=True)]
    by_prompt = {len(prompt): text for prompt, text in zip(PROMPTS, texts, strict=True)}

    class Several(Oracle):
        def start(self, context: Any) -> Any:
            return Oracle(by_prompt[context.prompt_length], target.vocab_size).start(context)

    engine = Engine(target, None, Several([], target.vocab_size), **SIZES)
    found = engine.generate_batch(PROMPTS, 50, batch=4)
    assert [one.token_ids for one in found] == truths
    assert {length for one in found for length in one.stats.acceptance_lengths} >= {1, 2, 3, 4, 5, 6, 7}
