"""The benchmark's oracle: a known text, guessed as well as it is told to."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import Engine, SamplingParams
from specdec.bench.oracle import Oracle, OraclePoint, sweep_oracle
from specdec.bench.shapes import SHAPES, random_model, random_prompt
from specdec.errors import ConfigError
from tests.models import target_for

PROMPT = random_prompt(SHAPES["toy"].vocab_size, 20)
NEW = 120


@pytest.fixture(scope="module")
def toy() -> Engine:
    return Engine(target_for(random_model("toy"), execution="fused"))


@pytest.fixture(scope="module")
def answer(toy: Engine) -> list[int]:
    return toy.generate(PROMPT, NEW).token_ids


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_accuracy_sets_the_tokens_per_step(toy: Engine, answer: list[int], depth: int) -> None:
    for accuracy in (0.0, 0.5, 0.9, 1.0):
        lengths: list[int] = []
        for seed in range(3 if 0 < accuracy < 1 else 1):
            oracle = Oracle({tuple(PROMPT): answer}, accuracy=accuracy, depth=depth, seed=seed)
            out = toy.with_drafter(oracle).generate(PROMPT, NEW)
            assert out.token_ids == answer
            lengths += out.stats.acceptance_lengths[:-1]  # the last one is cut
        mean = sum(lengths) / len(lengths)
        assert mean == pytest.approx(sum(accuracy**n for n in range(depth + 1)), rel=0.15 if 0 < accuracy < 1 else 0)


def test_known_text_may_be_sampled(toy: Engine) -> None:
    sampling = SamplingParams(temperature=100.0, seed=3)  # hot, for the toy is very sure of itself
    text = toy.generate(PROMPT, 40, sampling).token_ids
    out = toy.with_drafter(Oracle({tuple(PROMPT): text}, depth=3)).generate(PROMPT, 40, sampling)
    assert out.token_ids == text != toy.generate(PROMPT, 40).token_ids
    assert out.stats.acceptance_lengths == [4] * 10


def test_mistakes_are_the_same_each_time(toy: Engine, answer: list[int]) -> None:
    """So that the repeats of a measurement do the same work."""
    engine = toy.with_drafter(Oracle({tuple(PROMPT): answer}, accuracy=0.6))
    first, second = (engine.generate(PROMPT, NEW).stats.acceptance_lengths for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accuracy": 1.5}, r"oracle.accuracy is 1.5; it must be in \[0, 1\]"),
        ({"accuracy": -0.1}, "oracle.accuracy is -0.1"),
        ({"depth": 0}, "oracle.depth is 0; it must be at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Oracle({}, **options)


def test_unknown_prompt(toy: Engine, answer: list[int]) -> None:
    with pytest.raises(ConfigError, match="knows 1 prompts, and none is this one of 3 tokens; decode it with drafter"):
        toy.with_drafter(Oracle({tuple(PROMPT): answer})).generate([1, 2, 3], 8)


def test_sweep(toy: Engine) -> None:
    prompts = [PROMPT, random_prompt(256, 10, seed=1)]
    rounds: list[int] = []
    points = sweep_oracle(
        toy,
        prompts,
        accuracies=(0.5, 1.0),
        depths=(2, 4),
        max_new_tokens=30,
        repeats=1,
        on_round=lambda: rounds.append(1),
    )
    assert len(rounds) == 4
    assert [(p.depth, p.accuracy) for p in points] == [(2, 0.5), (2, 1.0), (4, 0.5), (4, 1.0)]
    assert all(p.same and p.speedup > 0 and p.row_cost > 0 for p in points)
    assert points[1].tokens_per_step == 3.0
    assert points[3].tokens_per_step == 5.0
    assert points[2].rows_per_step == pytest.approx(5, abs=0.5)


def test_point_takes_the_speedup_apart() -> None:
    point = OraclePoint(
        depth=4, accuracy=1.0, tokens_per_step=5.0, rows_per_step=5.0, speedup=4.0, row_cost=1.2, same=True
    )
    assert point.kept == pytest.approx(0.8)  # of the five tokens, the worth of four
    assert point.engine_share == pytest.approx(0.96)  # of which rows cost 1.2 explains all but 4 %
