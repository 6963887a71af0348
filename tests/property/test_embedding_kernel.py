"""The kernel that a recorded step begins with, under Triton's interpreter, against torch's look-ups."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
module = pytest.importorskip("specdec.runners.kernels.embedding")


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [12, 1500])
def test_each_row_has_its_embedding_and_its_turn(width: int, dtype: torch.dtype) -> None:
    """Of three sequences in one step, one of which goes on behind rows of its tree; a token that is none has any."""
    weight, cos, sin = torch.randn(9, width).to(dtype), torch.randn(50, 12).to(dtype), torch.randn(50, 12).to(dtype)
    where = {
        "tokens": torch.tensor([[8, 0, 3, 3], [1, -1, 0, 0], [2, 7, 0, 0]]),
        "counts": torch.tensor([[40, 0, 4], [3, 0, 2], [5, 2, 2]]),
        "places": torch.tensor([[40, 41, 41, 42], [3, 4, 0, 0], [5, 6, 6, 7]]),
    }
    tables = torch.tensor([cos.data_ptr(), sin.data_ptr()])
    hidden, cosines, sines = module.look_up(where, tables, 12, weight[0], weight)
    positions = torch.tensor([40, 41, 41, 42, 3, 4, 0, 0, 6, 7])
    assert torch.equal(hidden, weight[where["tokens"].flatten().clamp(min=0)])
    assert torch.equal(cosines[:10], cos[positions])
    assert torch.equal(sines[:10], sin[positions])
    none, *turns = module.look_up(where, tables, 12, weight[0], None)
    assert none is None
    assert all(torch.equal(one, other) for one, other in zip(turns, (cosines, sines), strict=True))
