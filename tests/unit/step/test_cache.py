"""The cache: where rows go, what a commit moves, how many fit; test_window_memory.py has the rings' sizes."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import DraftError
from specdec.native.library import library
from specdec.step.cache import KVCache, LayerSpec

FULL = LayerSpec(heads=1, key_dim=1, value_dim=2, window=None, device=torch.device("cpu"), dtype=torch.float64)
RING = LayerSpec(heads=1, key_dim=1, value_dim=2, window=4, device=torch.device("cpu"), dtype=torch.float64)


@pytest.fixture(params=["native", "torch"], autouse=True)
def moved_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move by the compiled library, and where there is none, by torch."""
    if request.param == "torch":
        monkeypatch.setattr("specdec.step.slots.library", lambda: None)
    elif library() is None:
        pytest.skip("no C compiler")


def write(cache: KVCache, layer: int, marks: list[float], start: int) -> None:
    """Keys are the marks, values their negatives."""
    rows = torch.tensor(marks, dtype=torch.float64)[None, None, :, None]
    cache.write(layer, rows, -rows.expand(-1, -1, -1, 2), start)


def held(cache: KVCache, layer: int) -> list[float]:
    keys, values = cache.keys[layer][0, 0, :, 0], cache.values[layer][0, 0, :, 1]
    size = min(cache.length, len(keys))
    assert torch.equal(keys[:size], -values[:size])
    return keys[:size].tolist()


def test_a_commit_by_hand() -> None:
    """Three tokens, then a tree of five rows of which 0, 2 and 4 are accepted: they move to slots 3, 4 and 5."""
    cache = KVCache([FULL, FULL], capacity=20, rows=5)
    for layer in (0, 1):
        write(cache, layer, [10, 11, 12], 0)
    cache.commit(range(3))
    for layer in (0, 1):
        write(cache, layer, [20, 21, 22, 23, 24], 3)
    cache.commit([0, 2, 4])
    assert cache.length == 6
    assert held(cache, 0) == held(cache, 1) == [10, 11, 12, 20, 22, 24]


def test_a_commit_reads_all_rows_before_it_writes_any() -> None:
    cache = KVCache([FULL], capacity=20, rows=6)
    write(cache, 0, [20, 21, 22, 23, 24, 25], 0)
    cache.commit([0, 3, 4, 5])
    assert held(cache, 0) == [20, 23, 24, 25]


def test_a_ring_wraps() -> None:
    """Window 4 and 3 rows: 6 slots. Positions 4, 5, 6 lie in slots 4, 5, 0; rows 0 and 2 become positions 4 and 5."""
    cache = KVCache([RING, FULL], capacity=50, rows=3)
    assert [group.size for group in cache.group_of] == [6, 53]
    for start in (0, 2):
        for layer in (0, 1):
            write(cache, layer, [start, start + 1], start)
        cache.commit([0, 1])
    for layer in (0, 1):
        write(cache, layer, [40, 41, 42], 4)
    assert cache.keys[0][0, 0, :, 0].tolist() == [42, 1, 2, 3, 40, 41]
    cache.commit([0, 2])
    assert cache.keys[0][0, 0, [1, 2, 3, 4, 5], 0].tolist() == [1, 2, 3, 40, 42]
    assert held(cache, 1) == [0, 1, 2, 3, 40, 42]


def test_layers_of_one_spec_share_a_tensor() -> None:
    cache = KVCache([FULL, RING, FULL], capacity=10, rows=2)
    assert len(cache.groups) == 2
    assert cache.group_of[0] is cache.group_of[2]
    assert [cache.index_in_group[layer] for layer in range(3)] == [0, 0, 1]
    write(cache, 2, [5], 0)
    assert cache.group_of[0].keys[1, 0, 0, 0, 0] == 5
    assert cache.nbytes == 8 * 3 * (2 * 12 + 5)


def test_rows_that_fit() -> None:
    """As many as a forward may have, up to the last token: a text of ``capacity`` tokens still has room for a tree."""
    cache = KVCache([FULL], capacity=4, rows=3)
    free = []
    for position in range(4):
        free.append(cache.free)
        write(cache, 0, [position], position)
        cache.commit([0])
    assert [*free, cache.free] == [3, 3, 3, 3, 3]
    cache.check(3)
    with pytest.raises(
        DraftError, match=r"draft has 4 rows but 3 slots are free; .* raise the engine's max_rows \(now 3\)"
    ):
        cache.check(4)
