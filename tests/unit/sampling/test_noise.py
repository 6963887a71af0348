"""The noise: a function of seed, stream, position, index and token; Gumbel and uniform by law, and uncorrelated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import kstest

from drafters.shared.vocabulary import coupled, top_k
from specdec.native.library import library
from specdec.sampling.noise import Noise

CPU = torch.device("cpu")
SIZE = 4096
ALARM = 1e-3  # p-value; the numbers are fixed, so this never flickers


def gumbel(seed: int, position: int, stream: int = Noise.TARGET, index: int = 0) -> npt.NDArray[np.float64]:
    return Noise(seed, SIZE, CPU).gumbel(position, stream, index).numpy()


def test_a_position_has_its_numbers_whatever_was_asked_before() -> None:
    for size in (50, 4096, 40_000):  # many positions are made at once, a few, and one
        noise = Noise(7, size, CPU)
        for position in (3, 4, 5, 300, 301, 4, 900, 0, 1, 7, 8, 12, 11):
            alone = Noise(7, size, CPU).gumbel(position)
            assert torch.equal(noise.gumbel(position), alone), (size, position)
            assert not torch.equal(noise.gumbel(position, Noise.DRAFT), alone)


def correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """In standard errors: of independent numbers it is about a standard normal one."""
    return float(np.corrcoef(one, other)[0, 1] * math.sqrt(len(one)))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**64 - 1, -1, -12345])
@pytest.mark.parametrize("stream", [Noise.TARGET, Noise.DRAFT, Noise.COIN])
def test_gumbel_law(seed: int, stream: int) -> None:
    for position in (0, 1, 2047, 10**6):
        numbers = gumbel(seed, position, stream)
        assert np.isfinite(numbers).all()
        assert kstest(numbers, "gumbel_r").pvalue > ALARM


@pytest.mark.slow
def test_gumbel_law_over_positions_and_seeds() -> None:
    """One token's numbers are as good as one position's."""
    noise = Noise(3, 2, CPU)
    assert kstest([float(noise.gumbel(p)[1]) for p in range(2000)], "gumbel_r").pvalue > ALARM
    assert kstest([float(Noise(seed, 2, CPU).gumbel(5)[1]) for seed in range(2000)], "gumbel_r").pvalue > ALARM
    assert kstest([float(noise.gumbel(5, Noise.COIN, i)[1]) for i in range(2000)], "gumbel_r").pvalue > ALARM


def test_uniform_law() -> None:
    noise = Noise(7, 1, CPU)
    for numbers in (
        [noise.uniform(position, Noise.COIN) for position in range(3000)],
        [noise.uniform(5, Noise.COIN, index) for index in range(3000)],
        [noise.uniform(5, stream) for stream in range(3000)],
        [Noise(seed, 1, CPU).uniform(5, Noise.COIN) for seed in range(3000)],
    ):
        assert 0 < min(numbers) < max(numbers) < 1
        assert kstest(numbers, "uniform").pvalue > ALARM
        assert abs(correlation(np.array(numbers[1:]), np.array(numbers[:-1]))) < 4


def test_nothing_is_correlated() -> None:
    """Neighbours in every direction: the next position, seed, stream, index and token."""
    base = gumbel(5, 100)
    others = {
        "positions": gumbel(5, 101),
        "seeds": gumbel(6, 100),
        "opposite seeds": gumbel(-5, 100),
        "streams": gumbel(5, 100, Noise.DRAFT),
        "indices": gumbel(5, 100, index=1),
    }
    for what, other in others.items():
        for shift in (-2, -1, 0, 1, 2):  # a counter hash may repeat its neighbour's numbers one token late
            assert abs(correlation(base, np.roll(other, shift))) < 4, (what, shift)
    for shift in (1, 2, 3):
        assert abs(correlation(base, np.roll(base, shift))) < 4


def test_no_number_comes_twice() -> None:
    keys = itertools.product((0, 1), range(4), (Noise.TARGET, Noise.DRAFT, Noise.COIN), range(3))
    numbers = np.concatenate([gumbel(seed, position, stream, index)[:256] for seed, position, stream, index in keys])
    assert len(np.unique(numbers)) == len(numbers)


def test_uniform_and_gumbel_are_one_hash() -> None:
    """The Python integers and the tensor's wrapped ones agree: ``uniform`` is the number below token 0's Gumbel."""
    for seed, position, stream, index in itertools.product((0, -1, 2**63), (0, 1, 999), (0, 1, 2), (0, 5)):
        noise = Noise(seed, 4, CPU)
        number = float(torch.exp(-torch.exp(-noise.gumbel(position, stream, index)[0])))
        assert number == pytest.approx(noise.uniform(position, stream, index), rel=1e-12, abs=1e-15)


def test_noise_has_no_state() -> None:
    noise = Noise(11, SIZE, CPU)
    first = noise.gumbel(4)
    noise.gumbel(9)
    noise.uniform(4, Noise.COIN)
    assert torch.equal(noise.gumbel(4), first)
    assert torch.equal(Noise(11, 64, CPU).gumbel(4), first[:64]), "a token's number must not depend on the vocabulary"


@pytest.mark.slow
def test_draw_follows_the_probabilities() -> None:
    probabilities = torch.tensor([0.0, 2.0, 1.0, 1.0])  # unnormalised
    counts = torch.zeros(4)
    for seed in range(4000):
        counts[Noise(seed, 4, CPU).draw(probabilities, 3, Noise.DRAFT)] += 1
    assert counts[0] == 0
    assert ((counts / 4000 - probabilities / 4).abs() < 4 * math.sqrt(0.25 / 4000)).all()


def test_the_noise_of_some_tokens_is_theirs() -> None:
    """By their numbers, at any position, whatever is made ahead."""
    whole, tokens = Noise(7, 50_000, torch.device("cpu")), torch.tensor([0, 3, 41, 49_999])
    some = whole.among(tokens)
    for position in (5, 6, 30, 2):
        assert torch.equal(some.gumbel(position), whole.gumbel(position)[tokens])
        assert torch.equal(
            some.gumbel_at(torch.tensor([position, 9])), torch.stack([some.gumbel(position), some.gumbel(9)])
        )
    assert some.uniform(5, Noise.DRAFT, 2) == whole.uniform(5, Noise.DRAFT, 2)
    scores = torch.tensor([0.1, 0.2, 0.0, 0.3])
    for odd in (tokens.int(), torch.stack((tokens, tokens), 1)[:, 0]):  # of another kind, and not one after the other
        assert whole.among(odd).foreseen(scores, 5, 1.0, 4) == some.foreseen(scores, 5, 1.0, 4)
    if library() is not None:
        with pytest.raises(ValueError, match="one a row"):
            some.foreseen(scores[:3], 5, 1.0, 4)


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 5, 32, 577, 8192])
def test_the_likeliest_draws_are_those_that_torch_finds(size: int, dtype: torch.dtype) -> None:
    """Their places in order, and their chances, with noise and without, of all tokens and of some."""
    torch.manual_seed(size)
    tokens = torch.randperm(3 * size)[:size].sort().values
    whole, some = Noise(7, size, CPU), Noise(7, 3 * size, CPU).among(tokens)
    for scores in (3 * torch.randn(3, size), torch.zeros(3, size), torch.randn(3, size) - 1e4):
        scores = scores.to(dtype)
        scores[1, 1::3] = -torch.inf  # as processors forbid tokens
        for noise, temperature in ((None, 1.0), (whole, 1.0), (whole, 0.3), (some, 1.7)):
            drawn, count = scores.double(), min(4, size)
            if noise is not None:
                drawn = coupled(drawn, torch.stack([noise.gumbel(position) for position in (9, 10, 11)]), temperature)
            expected = torch.softmax(drawn, -1)
            found = top_k(scores, 4, noise, 9, temperature)
            assert found is not None
            places, chances = torch.tensor(found[0]), torch.tensor(found[1], dtype=torch.float64)
            assert places.shape == (3, count)
            assert all(len(set(row)) == count for row in found[0])
            torch.testing.assert_close(chances, expected.gather(1, places), rtol=2e-4, atol=1e-7)
            torch.testing.assert_close(chances, expected.topk(count).values, rtol=2e-4, atol=1e-7)
            if noise is not None and drawn.isfinite().all() and size > 1:
                best = drawn.topk(2).values
                clear = best[:, 0] - best[:, 1] > 1e-3
                assert torch.equal(places[clear, 0], drawn.argmax(-1)[clear])


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_scores_that_are_no_distribution_have_no_chances() -> None:
    for odd in (torch.nan, torch.inf):
        scores = torch.zeros(2, 40)
        scores[1, 7] = odd
        found = top_k(scores, 3, None, 0, 1.0)
        assert found is not None
        assert found[1][0] == pytest.approx([1 / 40] * 3)
        assert not any(chance > 0 for chance in found[1][1])
