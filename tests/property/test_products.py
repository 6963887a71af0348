"""Products whose rows do not depend on each other, under Triton's interpreter: bit for bit, from 1 to 128 rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")
products = pytest.importorskip("specdec.kernels.product")


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "biased"),
    [(128, 256, False, True), (100, 72, False, False), (64, 192, True, True), (70, 40, True, False)],
)
def test_a_row_is_itself_beside_any_others(outputs: int, inputs: int, gated: bool, biased: bool) -> None:
    high = outputs * (2 if gated else 1)
    rows, weight = torch.randn(128, inputs).half(), (torch.randn(high, inputs) / inputs**0.5).half()
    bias = torch.randn(high).half() if biased else None
    several = products.product(rows, weight, bias, gated=gated)
    assert several.ndim == (3 if products.splits_of(outputs, inputs, gated) > 1 else 2)
    expected = F.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
    found = several if several.ndim == 2 else several.sum(0)
    assert (found.double() - expected).abs().max() < 1e-2
    for count in (1, 2, 16, 17, 33, 64, 65, 128):
        first = 128 - count  # they stand elsewhere, too
        fewer = products.product(rows[first:], weight, bias, gated=gated)
        assert torch.equal(fewer, several[..., first:, :]), count


def test_whole_sums_are_in_one_piece() -> None:
    rows, weight = torch.randn(3, 256).half(), torch.randn(64, 256).half()
    assert products.splits_of(64, 256, False) == 2
    assert products.product(rows, weight, None, whole=True).shape == (3, 64)
