"""A cache in pages: what it holds, which pages belong to which texts, and that all of them come back."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from specdec.errors import CacheError
from specdec.step import pages
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.pages import PAGE, PagePool
from tests import seam

ROWS, MOST = 20, 400
FULL = LayerSpec(heads=2, key_dim=4, value_dim=4, window=None, device=torch.device("cpu"), dtype=torch.float64)
SLIDING = LayerSpec(heads=1, key_dim=4, value_dim=4, window=70, device=torch.device("cpu"), dtype=torch.float64)
SPECS = (FULL, SLIDING, FULL)


def new_pools() -> dict[LayerSpec, PagePool]:
    return {FULL: PagePool(FULL, 2), SLIDING: PagePool(SLIDING, 1)}


class Text:
    """A text whose token at a position is a number; its cache in pages, and one whose slots lie beside each other."""

    def __init__(self, pools: dict[LayerSpec, PagePool]) -> None:
        self.tokens: list[int] = []
        self.both = [KVCache(SPECS, capacity=MOST, rows=ROWS, pools=own) for own in (pools, None)]

    def step(self, tokens: Sequence[int], path: Sequence[int]) -> None:
        """Write rows, and keep those on the path."""
        for cache in self.both:
            for layer, spec in enumerate(SPECS):
                rows = torch.tensor(tokens, dtype=torch.float64)[None, None, :, None] + 1000 * layer
                rows = rows.expand(1, spec.heads, len(tokens), 4) + torch.arange(spec.heads)[:, None, None] / 8
                cache.write(layer, rows, -rows, cache.length)
            cache.commit(path)
        self.tokens += [tokens[row] for row in path]

    def check(self) -> None:
        """Each layer has what it may see of the text, and no page that it may not."""
        for layer, spec in enumerate(SPECS):
            paged: Any = self.both[0].group_of[layer]
            beside, place = self.both[1].group_of[layer], self.both[0].index_in_group[layer]
            first = paged.first
            assert first == beside.first <= max(0, len(self.tokens) - (spec.window or MOST) + 1)
            found, expected = (group.read(first, len(self.tokens)) for group in (paged, beside))
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine[place], theirs[place])
            assert found[0][place][0, 0, :, 0].tolist() == [token + 1000 * layer for token in self.tokens[first:]]
            held = [page.address for page in paged.pages if page is not None]
            assert len(held) == -(-self.both[0].written // PAGE) - first // PAGE
            listed = paged.addresses.tolist()
            assert listed[first // PAGE :][: len(held)] == held
            assert {*listed[: first // PAGE]} <= {*held[:1]}  # which may be read where lengths are timed


def check_pages(texts: Sequence[Text], pools: dict[LayerSpec, PagePool]) -> None:
    """No page is both free and in a text, or twice in the same; and none is lost."""
    owned = set[int]()
    for text in texts:
        text.check()
        groups: list[Any] = text.both[0].groups
        own = [page.address for group in groups for page in group.pages if page is not None]
        assert len(own) == len({*own})
        owned |= {*own}
    for pool in pools.values():
        free = [address for _, address in pool._free]
        assert len(free) == len({*free}) == pool.pages - pool.used
        assert not owned & {*free}
    assert sum(pool.used for pool in pools.values()) == len(owned)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_texts_that_come_and_go_keep_what_is_theirs(seed: int) -> None:
    """Drafts of which some rows are kept, texts that branch off others, and texts that end, in any order."""
    rng, pools = random.Random(seed), new_pools()
    texts = [Text(pools)]
    for _ in range(50):
        text: Any = rng.choice(texts)
        other: Any = None
        what = rng.random()
        if what < 0.1 and len(texts) < 5:
            texts.append(Text(pools))
        elif what < 0.25 and text.tokens:
            other, count = Text(pools), rng.choice([len(text.tokens), rng.randrange(1, len(text.tokens) + 1)])
            taken = [cache.take(former, count) for cache, former in zip(other.both, text.both, strict=True)]
            assert taken[0] == taken[1]
            if taken[0]:
                other.tokens = text.tokens[:count]
                texts.append(other)
        elif what < 0.35:
            texts.remove(text)
            texts = texts or [Text(pools)]
        elif len(text.tokens) + ROWS < MOST:
            rows = rng.randrange(1, ROWS + 1)
            kept = sorted({0, *rng.sample(range(rows), rng.randrange(rows))})
            text.step([rng.randrange(1000) for _ in range(rows)], kept)
        text = other = None
        check_pages(texts, pools)
    texts.clear()
    assert [(pool.pages, pool.used, pool.nbytes) for pool in pools.values()] == [(0, 0, 0)] * 2


def test_memory_follows_the_texts() -> None:
    """A page more for each 64 tokens, the room of an ended text for the next, and the window's last pages only."""
    pools = new_pools()
    long, short = Text(pools), Text(pools)
    for cache, length in ((long.both[0], 350), (short.both[0], 3)):
        for start in range(0, length, 10):
            cache.reserve(start + 10)
    assert long.both[0].nbytes == 6 * pools[FULL].page_bytes + 2 * pools[SLIDING].page_bytes  # of 89 positions
    assert short.both[0].nbytes == pools[FULL].page_bytes + pools[SLIDING].page_bytes
    assert (pools[FULL].used, pools[FULL].pages, pools[SLIDING].used) == (7, 16, 3)
    assert long.both[0].nbytes <= KVCache.most_page_bytes(SPECS, capacity=350, rows=ROWS, drafted=0)
    del long, cache
    assert pools[FULL].used == 1
    again = Text(pools)
    again.both[0].reserve(350)
    assert (pools[FULL].used, pools[FULL].pages) == (7, 16)
    again.both[0].reserve(MOST + ROWS)
    assert again.both[0].grown == 0  # a block that was made before is still right


def test_full_pages_are_shared_with_a_text_that_begins_alike() -> None:
    pools = new_pools()
    text = Text(pools)
    for start in range(0, 140, 20):
        text.step(range(start, start + 20), range(20))
    other = KVCache(SPECS, capacity=MOST, rows=ROWS, pools=pools)
    assert other.take(text.both[0], 130)
    mine, theirs = (cache.groups[0].pages for cache in (other, text.both[0]))  # type: ignore[attr-defined]
    assert [one is two for one, two in zip(mine, theirs, strict=True)] == [True, True, False]
    assert pools[FULL].used == 4
    other.write(0, torch.zeros(1, 2, 1, 4).double(), torch.zeros(1, 2, 1, 4).double(), 130)
    del mine, theirs
    text.check()
    del text
    assert pools[FULL].used == 3


def test_what_a_window_s_first_page_does_not_hold_is_numbers() -> None:
    """It is masked, and yet read by layers that read copies: a NaN times nothing is a NaN."""
    spec = replace(SLIDING, window=20)
    pool = PagePool(spec, 1)
    former, other = (KVCache([spec], capacity=MOST, rows=5, pools={spec: pool}) for _ in range(2))
    for start in range(0, 120, 5):
        former.write(0, *torch.ones(2, 1, 1, 5, 4).double(), start)
        former.commit(range(5))
    for tensor, _ in pool._free:
        tensor.fill_(torch.nan)
    assert other.take(former, 120)
    assert other.groups[0].first == 96
    for copies in (other.keys, other.values):
        assert copies[0][:, :, :120].isfinite().all()
        assert (copies[0][:, :, 96:120] == 1).all()


class Copies(TorchFunctionMode):
    """Notes what would read from a device, or bring numbers to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("item", "tolist", "tensor", "as_tensor", "from_numpy", "numpy", "cpu", "to"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_no_page_costs_a_copy_to_the_device() -> None:
    text, copies = Text(new_pools()), Copies()
    with copies:
        for _ in range(40):
            text.both[0].reserve(text.both[0].length + 10)
            text.both[0].commit([0, 2, 5, *range(7, 10)])
    assert not copies.found


class Full:
    """In the place of ``torch.empty``: a device that has memory for some pages only."""

    def __init__(self, patch: pytest.MonkeyPatch, left: int) -> None:
        self._empty, self.left, self.asked = torch.empty, left, list[int]()
        patch.setattr(pages.torch, "empty", self)

    def __call__(self, shape: Any, *more: Any, **options: Any) -> torch.Tensor:
        if isinstance(shape, tuple):
            self.asked.append(shape[0])
            if shape[0] > self.left:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.left -= shape[0]
        return self._empty(shape, *more, **options)


@pytest.mark.slow
def test_a_device_without_memory_is_told_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer pages are asked for first, and texts that hang in a cycle are let go."""
    pools = {FULL: PagePool(FULL, 2)}
    device = Full(monkeypatch, left=5)
    texts = [KVCache([FULL, FULL], capacity=MOST, rows=ROWS, pools=pools) for _ in range(3)]
    texts[0].reserve(3 * PAGE)
    assert device.asked == [16, 3]
    texts[1].reserve(2 * PAGE)
    message = r"cpu has no memory left for 2 more pages of 64 tokens.*5 are in use\): lower max_new_tokens"
    with pytest.raises(CacheError, match=message):
        texts[2].reserve(2 * PAGE)
    with pytest.raises(CacheError):
        seam.Text(texts[2]).rows([1])
    cycle: list[Any] = [texts.pop(0)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        texts[1].reserve(2 * PAGE)
    finally:
        gc.enable()
    assert pools[FULL].used == 4


def test_threads_take_pages_of_one_pool() -> None:
    pool, found = PagePool(FULL, 1), list[set[int]]()

    def work() -> None:
        for _ in range(50):
            taken = pool.take(5)
            for page in taken:
                page.tensor.fill_(id(taken) % 97)
            assert all((page.tensor == id(taken) % 97).all() for page in taken)
        found.append({page.address for page in taken})

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert (pool.pages, pool.used) == (0, 0)
