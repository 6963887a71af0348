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


@pytest.mark.few(1)
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


@pytest.mark.few(1)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(140, 512, False), (70, 200, True)])
@pytest.mark.parametrize("count", [3, slow(33), slow(70), 200])
def test_every_cut_of_a_product_gives_the_same_numbers(outputs: int, inputs: int, gated: bool, count: int) -> None:
    generator, bucket = torch.Generator().manual_seed(1), products.bucket_of(count)
    weight = torch.randn(outputs * (1 + gated), inputs, generator=generator).half()
    rows = torch.randn(count, inputs, generator=generator).half()
    cuts, offered = products.cuts_of(outputs, inputs, gated, bucket), products.offered(outputs, inputs, gated, bucket)
    assert products.cut_of(outputs, inputs, gated, bucket) == offered[0]
    assert offered[0] in cuts
    # Warps and stages are nothing to the interpreter.
    kinds = {(cut.tile, cut.rows): cut for cut in cuts + offered}
    found = [products.product(rows, weight, None, gated=gated, cuts={bucket: cut}) for cut in kinds.values()]
    assert len(found) > 1
    assert all(torch.equal(one, found[0]) for one in found)


@given(outputs=st.integers(1, 200_000), turns=st.integers(1, 300), gated=st.booleans(), shared=st.sampled_from(SHARED))
def test_what_is_offered_sums_alike_and_fits(outputs: int, turns: int, gated: bool, shared: int) -> None:
    """The ranges of a sum and their order follow from the shape alone, whichever cut is chosen; and few are offered."""
    inputs, every = 64 * turns, set()
    for bucket in products.buckets_of(shared):
        offered = products.offered(outputs, inputs, gated, bucket, shared)
        assert len({*offered}) == len(offered) <= 5
        for cut in offered:
            every.add((cut.splits, -(-inputs // (cut.step * cut.splits)) * cut.step))
            assert cut.tile % 64 == 0, "one instruction of the tensor cores for all"
            assert bucket % cut.rows == 0
            assert cut.rows >= 16
        for cut in offered[1:]:
            assert 2 * cut.step * (cut.tile * (1 + gated) + cut.rows) * cut.stages <= shared - 4096
            assert cut.stages >= 2
    assert len(every) == 1
