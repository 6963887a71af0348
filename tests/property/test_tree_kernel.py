"""The Triton tree kernel under Triton's interpreter: random trees, windows and rings against a softmax over lists."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings

from specdec.errors import SpecdecWarning
from specdec.runners import attention, attention_kernels
from specdec.step.tree import Draft, ancestors
from tests.property.test_attention import Case, World, cases
from tests.tiers import each_once

CompilationError = pytest.importorskip("triton", reason="Triton is not installed").CompilationError
kernel = pytest.importorskip("specdec.runners.kernels.tree").tree_attention
if not torch.cuda.is_available():
    assert type(kernel.__globals__["_tree"]).__name__ == "InterpretedFunction", "tests/conftest.py sets the interpreter"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The split path takes the kernel on this CPU; per call, whether it went on from a prefix."""
    made: list[bool] = []

    def counted(*args: object) -> torch.Tensor:
        made.append(args[-1] is not None)
        return kernel(*args)

    monkeypatch.setattr(attention, "_tree_kernel", lambda query, keys, values: counted)
    return made


@given(case=cases())
@settings(max_examples=25)
def test_rows_see_their_ancestors_and_the_window(calls: list[bool], case: Case) -> None:
    calls.clear()
    world = World(Case(**{**vars(case), "softcap": None}))
    expected = world.naive()
    for pieces in (False, True):
        assert (world.attended("split", pieces=pieces).double() - expected).abs().max() < 1e-6
    assert calls


def test_more_rows_and_keys_than_one_program_takes(calls: list[bool]) -> None:
    """Two programs per head, two turns over the keys, with and without a prefix; half precision stays near."""
    for length in (0, 21):
        parents = [-1, *(max(0, row - 3) for row in range(1, 45))]
        case = Case(length=length, parents=parents, first=0, window=None, softcap=None, seed=0)
        for dtype, bound in ((torch.float32, 1e-6), (torch.float16, 4e-3)):
            world = World(case, dtype)
            got = world.attended("split", pieces=False)
            assert got.dtype == dtype
            assert (got.double() - world.naive()).abs().max() < bound
    assert calls == [False, False, True, True]


@pytest.mark.parametrize(  # also as many rows as a group has heads, and as there are heads
    ("rows", "indexed", "window"), each_once([1, 4, 32], [True, False], [9, None])
)
def test_grouped_heads_of_width_128(indexed: bool, rows: int, window: int | None) -> None:
    """Llama's 32 query heads on 8 key heads, over a tail with a window's edge, going on from a prefix."""
    generator = torch.Generator().manual_seed(rows)
    keys, values = (torch.randn(1, 8, 60, 128, generator=generator) for _ in range(2))
    query = torch.randn(1, 32, rows, 128, generator=generator)
    parents = [-1, *(max(0, row - 3) for row in range(1, rows))]
    depths = torch.tensor(Draft([0] * rows, parents).depths)
    edge = 5  # keys before the tree that a window may hide
    seen = torch.ones(rows, edge + rows, dtype=torch.bool)
    seen[:, edge:] = torch.from_numpy(ancestors(parents))
    if window is not None:
        places = torch.cat([torch.arange(-edge, 0), depths])
        seen &= depths[:, None] - places < window
    mask = torch.zeros(rows, edge + rows).masked_fill_(~seen, -torch.inf)
    first, scale = 20, 128**-0.5
    tail = torch.randperm(40, generator=generator)[: edge + rows] + first if indexed else (first, first + edge + rows)
    prior = attention_kernels.plain_attention(query, keys[:, :, :first], values[:, :, :first], scale, None)
    got = kernel(query, keys, values, tail, mask, scale, prior)
    slots = tail if isinstance(tail, torch.Tensor) else torch.arange(*tail)
    chosen = torch.cat([torch.arange(first), slots])
    k, v = (x[:, :, chosen].double().repeat_interleave(4, 1) for x in (keys, values))
    whole = torch.cat([torch.ones(rows, first, dtype=torch.bool), seen], 1)
    scores = (query.double() @ k.transpose(2, 3) * scale).masked_fill(~whole, -torch.inf)
    assert (got.double() - torch.softmax(scores, -1) @ v).abs().max() < 2e-6


def test_widths_that_are_no_power_of_two() -> None:
    query, keys, values = torch.randn(1, 6, 5, 12), torch.randn(1, 2, 9, 12), torch.randn(1, 2, 9, 20)
    got = kernel(query, keys, values, (3, 8), None, 0.3)
    seen = torch.ones(5, 5).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys[:, :, 3:8], values[:, :, 3:8], attn_mask=seen, scale=0.3, enable_gqa=True
    )
    assert (got - expected).abs().max() < 1e-6
    slots = torch.tensor([3, 4, 5, 6, 7])
    assert torch.equal(kernel(query, keys, values, slots, None, 0.3), got)


def test_a_kernel_that_fails_is_replaced_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise CompilationError("", None, "cannot take constexpr")

    shape = (torch.device("cpu"), torch.float32, 2, 8, 8)
    assert attention._load_tree_kernel.__wrapped__(*shape) is kernel
    with monkeypatch.context() as patch:
        patch.setattr("specdec.runners.kernels.tree.tree_attention", refused)
        with pytest.warns(SpecdecWarning, match=r"Triton kernel for trees is not used.*CompilationError"):
            assert attention._load_tree_kernel.__wrapped__(*shape) is None
    monkeypatch.setitem(sys.modules, "specdec.runners.kernels.tree", None)
    with pytest.warns(SpecdecWarning, match=r"Triton kernel for trees is not used.*ModuleNotFoundError"):
        assert attention._load_tree_kernel.__wrapped__(*shape) is None
