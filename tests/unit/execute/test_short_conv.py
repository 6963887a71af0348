"""A short convolution: a row's window is its ancestors, then committed tokens, then nothing, whatever ran meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from specdec.execute.short_conv import convolved
from specdec.runners.rows import Rows
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.joining import joined
from specdec.step.step_io import StepInput
from tests import seam

WIDTH, ROWS, MOST, SIZE = 4, 7, 90, 5
TABLE = torch.randn(50, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TAPS = torch.randn(WIDTH, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
BIAS = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
SPEC = LayerSpec(1, SIZE, 0, WIDTH, torch.device("cpu"), torch.float64)


def new_text() -> KVCache:
    cache = KVCache([SPEC], capacity=MOST, rows=ROWS)
    cache.keys[0].fill_(torch.nan)  # never written
    return cache


def run(step: StepInput) -> torch.Tensor:
    """Rows whose inputs are their tokens' rows of a table."""
    return convolved(Rows(step), 0, TAPS, BIAS, TABLE[torch.from_numpy(step.ids)])


def last_of(tokens: Sequence[int]) -> torch.Tensor:
    """What the last of these tokens gets, one by one from the oldest on."""
    window = [None] * WIDTH + [*tokens]
    total = BIAS
    for tap, token in zip(TAPS, window[-WIDTH:], strict=True):
        total = torch.addcmul(total, torch.zeros(SIZE).double() if token is None else TABLE[token], tap)
    return total


def tree_of(rng: random.Random, rows: int) -> tuple[list[int], list[int]]:
    """Random parents and depths."""
    parents = [-1, *(rng.randrange(row) for row in range(1, rows))]
    depths = list[int]()
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return parents, depths


def path_to(parents: Sequence[int], row: int) -> list[int]:
    return [*(path_to(parents, parents[row]) if parents[row] >= 0 else []), row]


@pytest.mark.parametrize("seed", range(4))
def test_trees_that_are_accepted_in_part(seed: int) -> None:
    """Bit for bit what each path has by itself: whole trees and level by level, twice, rejected rows and none accepted,
    chunks and plain steps behind them, and texts that go on from a beginning of this one.
    """
    rng, text, tokens = random.Random(seed), new_text(), list[int]()
    while len(tokens) < MOST - ROWS:
        rows = rng.choice([1, 1, 2, ROWS])
        own = [rng.randrange(50) for _ in range(rows)]
        tree = tree_of(rng, rows) if rng.random() < 0.7 else None
        parents = range(-1, rows - 1) if tree is None else tree[0]
        paths = [[own[one] for one in path_to(parents, row)] for row in range(rows)]
        expected = torch.stack([last_of([*tokens, *above]) for above in paths])
        for _ in range(2):  # a forward is a function of what is committed and its rows
            assert torch.equal(run(StepInput.of(text, own, tree)), expected)
        first = rng.randrange(1, rows + 1)
        for begin, end in ((0, first), (first, rows)):
            if begin < end:
                part = run(StepInput.of(text, own[begin:end], tree and tuple(one[:end] for one in tree), first=begin))
                assert torch.equal(part, expected[begin:end])
        path = rng.choice([[], [0], path_to(parents, rng.randrange(rows))])
        text.commit(path)
        tokens += [own[row] for row in path]
        count = rng.randrange(len(tokens) + 1)
        other = new_text()
        if other.take(text, count):
            assert torch.equal(run(StepInput.of(other, [7])), last_of([*tokens[:count], 7])[None])
            text = other if count == len(tokens) else text
        else:  # its window is gone
            assert count < len(tokens) or not count


def test_texts_beside_each_other() -> None:
    """Of other lengths, one with a tree, and one that has no token yet."""
    texts, held = [new_text() for _ in range(3)], [[3, 1, 4, 1, 5], [2, 7], []]
    for text, tokens in zip(texts, held, strict=True):
        if tokens:
            run(StepInput.of(text, tokens))
            text.commit(range(len(tokens)))
    parents = [-1, 0, 0, 2]
    tree = (parents, [0, 1, 1, 2])
    steps = [StepInput.of(texts[0], [9]), StepInput.of(texts[1], [8, 6, 5, 4], tree), StepInput.of(texts[2], [1, 2])]
    own = [[9], *([[8, 6, 5, 4][one] for one in path_to(parents, row)] for row in range(4)), [1], [1, 2]]
    before = [held[0], *[held[1]] * 4, held[2], held[2]]
    expected = [last_of([*first, *last]) for first, last in zip(before, own, strict=True)]
    assert torch.equal(run(joined(steps)), torch.stack(expected))


def test_half_precision_is_rounded_once() -> None:
    half = torch.bfloat16
    cache = KVCache([LayerSpec(1, SIZE, 0, WIDTH, torch.device("cpu"), half)], capacity=MOST, rows=ROWS)
    inputs = TABLE[:ROWS].to(half)
    found = convolved(Rows(StepInput.of(cache, range(ROWS))), 0, TAPS.float(), None, inputs)
    padded = torch.cat([torch.zeros(WIDTH - 1, SIZE), inputs.float()])
    exact = sum(padded[tap : tap + ROWS] * TAPS[tap].float() for tap in range(WIDTH))
    assert torch.equal(found, torch.as_tensor(exact).to(half))


def test_a_window_is_all_that_is_held() -> None:
    """And the rows of a tree: bytes do not grow with the text."""
    text = seam.Text(new_text())
    assert text.stored()[0].shape == (1, 1, 0, SIZE)
    assert KVCache.most_bytes([SPEC], capacity=10**6, rows=ROWS) == (WIDTH + ROWS - 1) * SIZE * 8
    assert new_text().nbytes == (WIDTH + ROWS - 1) * SIZE * 8
