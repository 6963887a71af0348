"""Products whose rows do not depend on each other, under Triton's interpreter: bit for bit, from 1 to 128 rows.

It multiplies no bfloat16 numbers, so they are float16.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")
products = pytest.importorskip("specdec.runners.kernels.product")

SHARED = (227 << 10, 163 << 10, 99 << 10)  # bytes that a program may share: H100, A100, RTX 4090
COUNTS = (1, 2, 16, 17, 33, 64, 65, 128)


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "biased", "counts"),
    [
        (100, 72, False, True, COUNTS),
        (64, 192, True, True, (1, 17, 65)),
        (128, 256, False, False, (1, 17, 65)),
        slow(128, 256, False, True, tuple(range(1, 129))),
        slow(70, 40, True, False, tuple(range(1, 129))),
        slow(1, 8, False, False, COUNTS),
        slow(33, 1000, False, True, COUNTS),
        slow(65, 384, True, True, COUNTS),
    ],
)
def test_a_row_is_itself_beside_any_others(
    outputs: int, inputs: int, gated: bool, biased: bool, counts: tuple[int, ...]
) -> None:
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
    for count in counts:
        first = 128 - count  # they stand elsewhere, too
        fewer = products.product(rows[first:], weight, bias, gated=gated)
        assert torch.equal(fewer, several[..., first:, :]), count


@given(
    outputs=st.integers(1, 200_000), turns=st.integers(1, 500), odd=st.integers(0, 127), gated=st.booleans(),
    shared=st.sampled_from(SHARED),
)  # fmt: skip
def test_how_a_sum_is_cut_follows_from_the_weight_alone(
    outputs: int, turns: int, odd: int, gated: bool, shared: int
) -> None:
    """Where the ranges of inputs end is the same for one row and for hundreds, on every device."""
    inputs = 128 * turns + odd
    ends = set()
    for bucket in products.buckets_of(shared):
        cut = products.cut_of(outputs, inputs, gated, bucket, shared)
        each = -(-inputs // (cut.step * cut.splits)) * cut.step  # inputs of a range, as the kernel has it
        assert each * (cut.splits - 1) < inputs <= each * cut.splits
        ends.add((cut.splits, each))
    assert len(ends) == 1
    assert not gated or cut.splits == 1  # a gate is taken of a whole sum


def test_whole_sums_are_in_one_piece() -> None:
    rows, weight = torch.randn(3, 256).half(), torch.randn(64, 256).half()
    assert products.splits_of(64, 256, False) == 2
    assert products.product(rows, weight, None, whole=True).shape == (3, 64)


@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(40, 512, False), (24, 200, True)])
def test_every_cut_of_a_product_gives_the_same_numbers(outputs: int, inputs: int, gated: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(outputs * (1 + gated), inputs, generator=generator).half()
    rows = torch.randn(3, inputs, generator=generator).half()
    cuts = products.cuts_of(outputs, inputs, gated, 16)
    assert products.cut_of(outputs, inputs, gated, 16) in cuts
    # Warps and stages are nothing to the interpreter.
    found = [products.product(rows, weight, None, gated=gated, cut=cut) for cut in {c.tile: c for c in cuts}.values()]
    assert len(found) > 1
    assert all(torch.equal(one, found[0]) for one in found)
