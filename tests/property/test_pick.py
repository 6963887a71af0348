"""The kernels that end a recorded step, under Triton's interpreter, against torch's argmax and the noise of draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.sampling.noise import Noise, inverse_bits
from specdec.step.step_output import finite_argmax

pytest.importorskip("triton", reason="Triton is not installed")
module = pytest.importorskip("specdec.runners.kernels.pick")

CPU = torch.device("cpu")


def drawn(logits: torch.Tensor, noise: Noise, position: int, scale: float) -> int:
    return int(finite_argmax(((logits.float() * scale) + noise.gumbel(position))[None])[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("tokens", [7, 300, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_each_row_has_its_argmax_and_its_draw(tokens: int, dtype: torch.dtype) -> None:
    """Of three sequences, of which one is greedy and one has a row that is no row; ties go to the first token."""
    generator = torch.Generator().manual_seed(tokens)
    logits = (torch.randn(12, tokens, generator=generator) * 3).to(dtype)
    logits[2] = 1.0
    logits[3, tokens // 2], logits[5, 1], logits[6] = torch.nan, torch.inf, -torch.inf
    logits[7] = -torch.inf
    logits[7, 5] = -2.0
    noises = [Noise(seed, tokens, CPU) for seed in (3, 2**63 + 5)]
    temperatures = [0.8, 1.3]
    draws = np.array(
        [*((own.start, inverse_bits(by)) for own, by in zip(noises, temperatures, strict=True)), (0, 0)], dtype=np.int64
    )
    places = torch.tensor([[40, 41, 41, 42], [900, 901, 902, 0], [7, 8, 9, 10]])
    where = {"draws": torch.from_numpy(draws), "counts": torch.zeros(3, 3, dtype=torch.int64), "places": places}
    best, own, *_ = module.pick(logits, where).T
    assert torch.equal(best, finite_argmax(logits))
    assert best[[3, 5, 6]].tolist() == [-1, -1, -1]
    assert best[2] == 0
    for row in range(8):
        scale = float(np.float32(1) / np.float32(temperatures[row // 4]))
        position = int(places[row // 4, row % 4]) + 1
        assert own[row] == drawn(logits[row], noises[row // 4], position, scale), row
    assert own[8:].tolist() == [-1] * 4


def test_rows_behind_others_of_their_tree_have_their_own_positions() -> None:
    logits, noise = torch.randn(2, 500), Noise(4, 500, CPU)
    where = {
        "draws": torch.tensor((noise.start, inverse_bits(1.0))), "counts": torch.tensor([9, 2, 2]),
        "places": torch.tensor([9, 10, 11, 11]),
    }  # fmt: skip
    assert module.pick(logits, where)[:, 1].tolist() == [drawn(row, noise, 12, 1.0) for row in logits]
