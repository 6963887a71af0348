"""The Triton kernel of recorded steps under Triton's interpreter: trees, windows, rings and buckets."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from specdec.runners.sent_rows import SentText
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.pages import PagePool
from tests import seam
from tests.property.test_attention import GROUPS, HEADS, MOST, WIDTH, Case, World, cases
from tests.tiers import once

pytest.importorskip("triton", reason="Triton is not installed")
step = pytest.importorskip("specdec.runners.kernels.step")

TREE = [-1, 0, 0, 1, 2, 4, 3, 5]
FORK = [-1, 0, 1, 0, 3]


def scattered(spec: LayerSpec) -> dict[LayerSpec, PagePool]:
    """A pool whose pages, of NaNs, lie in another order than they are taken in."""
    pool = PagePool(spec, 1)
    pages = pool.take(9)
    for page in pages:
        page.tensor.fill_(torch.nan)
    kept = pages.pop()  # or all memory would go back
    pool.spare = kept  # type: ignore[attr-defined]
    for place in (3, 0, 5, 1, 7, 2, 6, 4):
        pages[place] = None  # type: ignore[call-overload]
    return {spec: pool}


class Text:
    """Random keys, values and queries of a text's tokens, and the kernel's attention for any rows of it."""

    def __init__(
        self, length: int, heads: int, groups: int, width: int, window: int | None, *, paged: bool = False
    ) -> None:
        dtype = torch.float16
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(1, count, length, width, generator=generator) for count in (groups, groups, heads)]
        self.keys, self.values, self.query = (one.to(dtype) for one in made)
        self.window, self.groups, self.width = window, groups, width
        self.spec = LayerSpec(groups, width, width, window, torch.device("cpu"), dtype)
        self.pools = scattered(self.spec) if paged else None

    def committed(self, length: int) -> KVCache:
        """A cache of the text's first tokens."""
        cache = KVCache([self.spec], capacity=self.keys.shape[2], rows=16, pools=self.pools)
        for start in range(0, length, 16):
            last = min(start + 16, length)
            cache.write(0, self.keys[:, :, start:last], self.values[:, :, start:last], start)
            cache.commit(range(last - start))
        return cache

    def attend(self, rows: SentText, first: int, more: int = 0) -> torch.Tensor:
        """[T, heads x width] of rows that are the text's tokens from ``first`` on, with room for ``more``."""
        last, segments = first + rows.rows, step.segments_of(self.keys.shape[2]) + more
        rows.store(self.keys[:, :, first:last], self.values[:, :, first:last], 0)
        where = rows.where()
        if "closure" in where:
            where["paths"] = step.paths(where)
        else:  # as CudaRunner has it for a chunk of a prompt
            where["places"] = rows.positions[0]
            where["paths"] = torch.arange(rows.rows, dtype=torch.int32).repeat(rows.rows, 1)
        query = self.query.new_zeros(1, len(where["paths"]), self.query.shape[1], self.width)
        query[:, : rows.rows] = self.query[:, :, first:last].transpose(1, 2)
        found = step.step_attention(
            query.transpose(1, 2), where, 0, self.groups, self.window, self.width**-0.5, segments
        )
        return found[: rows.rows]


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("length", "parents", "window", "heads", "width"),
    [
        (61, TREE, None, (2, 1), 8),  # across a border of 64 keys, and of pages
        (125, FORK, 70, (3, 1), 20),  # of segments, with a window; an odd group and width
        slow(0, TREE, None, (2, 2), 16),
        slow(3, TREE, 2, (4, 2), 8),  # a window shorter than the tree
        slow(126, TREE, 128, (8, 1), 64),
        slow(250, [-1, *range(11)], 100, (4, 4), 96),
        slow(30, TREE, None, (2, 1), 256),  # of which fewer keys and rows are taken at a time
        slow(62, TREE, 64, (32, 1), 12),  # more heads than a program's rows
    ],
)
def test_a_drafted_row_is_the_same_token_decoded_plainly(
    length: int, parents: list[int], window: int | None, heads: tuple[int, int], width: int
) -> None:
    """Bit for bit, down every path of a tree, token by token, of a cache in pages; and in one whose slots are not."""
    text, beside = (Text(length + len(parents), *heads, width, window, paged=paged) for paged in (True, False))
    drafted, contiguous = (
        one.attend(seam.Text(one.committed(length)).sent([0] * len(parents), parents), length) for one in (text, beside)
    )
    assert torch.equal(drafted, contiguous)
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        cache = text.committed(length)
        for row in path:
            assert torch.equal(text.attend(seam.Text(cache).sent([0]), length + row)[0], drafted[row]), (leaf, row)
            cache.commit([0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "before", "window"),
    [
        (130, (1, 6), 64),
        (130, (2, 15), 64),
        (66, (1, 2, 4, 7, 15), None),
        (129, (1, 3, 15), 5),
        (20, (20, 7), None),
    ],
)
def test_a_row_is_itself_wherever_its_step_begins(place: int, before: tuple[int, ...], window: int | None) -> None:
    """Alone, as a chain's last row, as a prompt's, and with room for a longer text."""
    text = Text(place + 1, 2, 1, 8, window, paged=window != 5)
    alone = text.attend(seam.Text(text.committed(place)).sent([0]), place)[0]
    for rows in before:
        for again in (True, False):
            own = seam.Text(text.committed(place - rows)).sent([0] * (rows + 1), again=again)
            assert torch.equal(text.attend(own, place - rows, more=3)[-1], alone), (rows, again)


def test_segments_of_a_text() -> None:
    """As many as begin before its end."""
    ends = [*(first for first, _, _ in step._LEVELS[1:]), 1 << 18]
    borders = [at for (first, _, size), end in zip(step._LEVELS, ends, strict=True) for at in range(first, end, size)]
    for positions in (1, 128, 129, 2048, 2049, 8192, 8193, 32768, 32769, 131072):
        assert step.segments_of(positions) == sum(at < positions for at in borders), positions


def attended(world: World) -> torch.Tensor:
    """[1, HEADS, T, WIDTH] of a world's tree in one piece, or in two."""
    case = world.case
    spec = LayerSpec(GROUPS, WIDTH, WIDTH, case.window, torch.device("cpu"), world.keys.dtype)
    cache = KVCache([spec], capacity=case.length + 1, rows=max(MOST, len(case.parents)))
    for store in (*cache.keys, *cache.values):
        store.fill_(torch.nan)
    for start in range(0, case.length, 5):
        rows = min(5, case.length - start)
        cache.write(0, *world.rows(start, start + rows), start)
        cache.commit(range(rows))
    outputs, cuts = [], sorted({0, case.first, len(case.parents)})
    for first, last in pairwise(cuts):
        parents = None if world.draft.is_chain else case.parents[:last]
        own = seam.Text(cache).sent([0] * (last - first), parents, first=first)
        own.store(*world.rows(case.length + first, case.length + last), 0)
        where = own.where()
        where["paths"] = step.paths(where)
        padded = world.query.new_full((1, HEADS, len(where["closure"]), WIDTH), torch.nan)
        padded[:, :, : last - first] = world.query[:, :, first:last]
        query = padded.transpose(1, 2).contiguous().transpose(1, 2)  # as it comes, row by row
        output = step.step_attention(
            query, where, 0, GROUPS, case.window, WIDTH**-0.5, step.segments_of(case.length + MOST + 64)
        )
        assert not output[last - first :].any()
        outputs.append(output[: last - first].view(-1, HEADS, WIDTH).transpose(0, 1)[None])
    return torch.cat(outputs, 2)


@given(case=cases())
@settings(max_examples=8)
def test_rows_see_their_ancestors_and_the_window(case: Case) -> None:
    world = World(Case(**{**vars(case), "softcap": None}))
    assert (attended(world).double() - world.naive()).abs().max() < 1e-6


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "precision"),
    [
        *once([(21, 45), (700, 3)], [(torch.float32, 1e-6), (torch.float16, 4e-3)]),
        pytest.param((0, 45), (torch.float16, 4e-3), marks=pytest.mark.slow),
    ],
)
def test_more_rows_and_keys_than_one_program_takes(size: tuple[int, int], precision: tuple[torch.dtype, float]) -> None:
    """Several programs beside each other over rows, over heads and over keys; half precision stays near."""
    (length, rows), (dtype, bound) = size, precision
    parents = [-1, *(max(0, row - 3) for row in range(1, rows))]
    world = World(Case(length=length, parents=parents, first=0, window=None, softcap=None, seed=0), dtype)
    got = attended(world)
    assert got.dtype == dtype
    assert (got.double() - world.naive()).abs().max() < bound
