"""Mistral's rolling buffer and chunked prefill: memory that does not grow, and text that does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec import Engine
from specdec.step.cache import KVCache, LayerSpec
from tests import seam
from tests.fakes import Oracle, Spy
from tests.models import VOCAB, WINDOW, greedy, live, model_of, prompt_of, target_of
from tests.tiers import each_once

ROWS = 12
PROMPT = prompt_of(5)
SPEC = LayerSpec(heads=2, key_dim=8, value_dim=8, window=WINDOW, device=torch.device("cpu"), dtype=torch.float64)


def cache_of(drafter: Any, new: int, *, family: str = "mistral", prompt: Sequence[int] = PROMPT) -> KVCache:
    """The target's cache after a generation that is checked to be plain decoding's."""
    spy = Spy(drafter)
    out = Engine(target_of(family), None, spy, max_rows=ROWS).generate(prompt, new)
    assert out.token_ids == greedy(family, tuple(prompt), new)
    return spy.context.cache


def oracle(new: int, family: str = "mistral") -> Oracle:
    return Oracle([*PROMPT, *greedy(family, PROMPT, new)], VOCAB)


@pytest.mark.slow
def test_rolling_buffer_stays_and_is_exact() -> None:
    """Eight windows' length of text, in trees, in the bytes of one."""
    short, long = 8 * WINDOW, 16 * WINDOW
    caches = [cache_of(oracle(new), new) for new in (short, long)]
    assert caches[0].nbytes == caches[1].nbytes
    assert caches[1].length > 16 * WINDOW
    (group,) = caches[0].groups
    assert group.size == WINDOW + ROWS - 1
    dims = 2 * 2 * 8  # keys and values, heads, width
    assert caches[0].nbytes == model_of("mistral").config.num_hidden_layers * group.size * dims * 8


def test_without_a_window_the_cache_is_the_text() -> None:
    short, long = (cache_of(oracle(new, "llama"), new, family="llama") for new in (8, 80))
    assert short.groups[0].size == len(PROMPT) + 8 + ROWS
    assert long.groups[0].size == len(PROMPT) + 80 + ROWS


def test_mixed_layers_ring_only_the_windowed_ones() -> None:
    cache = cache_of(oracle(80, "qwen2"), 80, family="qwen2")
    full, windowed, again = cache.group_of
    assert windowed is again
    assert (windowed.size, full.size) == (WINDOW + ROWS - 1, len(PROMPT) + 80 + ROWS)


@pytest.mark.parametrize("rows", [1, 2, ROWS, 40])
@pytest.mark.parametrize("capacity", [4, 100, 10_000])
def test_ring_has_room_for_a_tree_of_dead_keys(rows: int, capacity: int) -> None:
    """At least W + T - 1 slots, or as many as there can be tokens."""
    slots = SPEC.slots(capacity, rows)
    assert slots == min(WINDOW + rows - 1, capacity + rows)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_rejected_rows_overwrite_dead_keys_only(rows: int) -> None:
    """After every forward of ``rows`` rows, committed or not, the window before the root stands untouched."""
    cache = KVCache([SPEC], capacity=1000, rows=rows)
    for round_ in range(50):
        marks = torch.arange(cache.length, cache.length + rows, dtype=torch.float64)
        cache.write(0, *(marks[None, None, :, None].expand(1, 2, -1, 8) for _ in range(2)), cache.length)
        seen = range(max(0, cache.length - WINDOW + 1), cache.length + rows)
        slots = cache.groups[0].index((seen.start, seen.stop))
        assert cache.keys[0][0, 0, slots, 0].tolist() == list(seen)
        cache.commit(range(1 + round_ % rows))  # the rest is rejected, and written over


def test_commit_gathers_rows_that_lie_apart() -> None:
    cache = KVCache([SPEC], capacity=1000, rows=6)
    expected: list[float] = []
    for round_ in range(20):
        marks = 100.0 * round_ + torch.arange(6, dtype=torch.float64)
        cache.write(0, *(marks[None, None, :, None].expand(1, 2, -1, 8) for _ in range(2)), cache.length)
        cache.commit([0, 2, 3, 5] if round_ % 2 else [0, 5])
        expected += [100 * round_ + row for row in ([0, 2, 3, 5] if round_ % 2 else [0, 5])]
        seen = range(max(0, cache.length - WINDOW + 1), cache.length)
        for tensor in (cache.keys[0], cache.values[0]):
            assert tensor[0, 1, cache.groups[0].index((seen.start, seen.stop)), 3].tolist() == expected[seen.start :]


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "in_parts"), [*each_once(["llama", "mistral"], [False, True]), ("gemma2", False)])
def test_chunks_of_the_prompt_change_nothing(family: str, in_parts: bool) -> None:
    prompt = prompt_of(61)
    for chunk in (1, 3, WINDOW, 20, 60, 500, None):
        engine = Engine(target_of(family), None, "lookahead", max_rows=16, prefill_chunk=chunk)
        with seam.in_parts(in_parts):
            found = engine.generate(prompt, 20)
        assert found.token_ids == greedy(family, prompt, 20), f"chunks of {chunk}"


def test_chunk_is_the_window_where_that_is_small() -> None:
    chunks: list[int] = []
    spy = Spy(oracle(1), on_seen=lambda context, seen: chunks.append(len(seen.path)))
    spy.taps = frozenset({1})  # only drafters with taps are shown the prompt
    Engine(target_of("mistral"), None, spy).generate(prompt_of(101), 1)
    assert chunks == [32, 32, 32, 4]
    chunks.clear()
    Engine(target_of("llama"), None, spy).generate(prompt_of(101), 1)
    assert chunks == [100]


class Largest(TorchDispatchMode):
    """Notes the size in bytes of the largest storage that an operation made, but not of the cache itself."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return output


def peak(family: str, in_parts: bool, size: int, chunk: int) -> int:
    """Bytes of the largest tensor made in the prefill of a prompt of ``size`` tokens."""
    target = target_of(family)
    decoding = Engine(target, max_rows=16, prefill_chunk=chunk).start(prompt_of(size), 1)
    with target.active(), seam.in_parts(in_parts), Largest() as largest:
        decoding.prefill()
    return largest.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "in_parts"), [("mistral", False), ("mistral", True), ("llama", True)])
def test_prefill_memory_does_not_grow_with_the_prompt(family: str, in_parts: bool) -> None:
    peaks = [peak(family, in_parts, size, chunk=16) for size in (49, 97, 225)]
    assert len(set(peaks)) == 1, peaks
    whole = peak(family, in_parts, 225, chunk=512)
    assert whole > 4 * peaks[0], "the prefill in one piece should need more, or this measures nothing"


def test_prefill_makes_no_logits() -> None:
    """[n, V] logits of the prompt would be the largest tensor of all."""
    calls: list[int] = []
    target = target_of("llama", execution="modules")
    hook = live(target).lm_head.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    try:
        Engine(target).generate(prompt_of(40), 3)
    finally:
        hook.remove()
    assert calls == [1, 1, 1, 1]  # a whole forward has its head; of the prompt it is asked for one row
