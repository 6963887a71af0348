"""The cache grows with the text: exact over every growth, and no larger than what was written asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec import Engine, TransformersTarget
from specdec.native.library import library
from specdec.step.cache import KVCache, LayerSpec
from tests.models import new_model, prompt_of, reference, settings_of, target_for

SPEC = LayerSpec(heads=2, key_dim=4, value_dim=3, window=None, device=torch.device("cpu"), dtype=torch.float64)
RING = LayerSpec(heads=2, key_dim=4, value_dim=3, window=40, device=torch.device("cpu"), dtype=torch.float64)
PROMPT, NEW = prompt_of(9), 60


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that begin with 8 slots, so that they grow at once and often."""
    monkeypatch.setattr("specdec.step.slots._START", 8)


@pytest.mark.usefixtures("small")
def test_what_was_written_stays() -> None:
    cache = KVCache([SPEC, RING, SPEC], capacity=1000, rows=5)
    sizes = []
    for place in range(200):
        cache.reserve(place + 5)
        sizes.append([group.size for group in cache.groups])
        for layer in range(3):
            rows = torch.full((1, 2, 1, 4), float(place + 1000 * layer), dtype=torch.float64)
            cache.write(layer, rows, -rows[..., :3], place)
        cache.commit([0])
    for layer in (0, 2):
        expected = [float(place + 1000 * layer) for place in range(200)]
        assert cache.keys[layer][0, 1, :200, 3].tolist() == expected
        assert (-cache.values[layer][0, 1, :200, 2]).tolist() == expected
    slots = cache.group_of[1].index((161, 200))
    assert cache.keys[1][0, 1, slots, 3].tolist() == [float(1000 + place) for place in range(161, 200)]
    assert sizes[0] == [8, 8]
    assert sizes[-1] == [256, 44]
    assert cache.grown == 5  # a few copies for 200 tokens


def test_memory_follows_the_text_and_not_the_promise() -> None:
    cache = KVCache([SPEC], capacity=10**9, rows=128)
    assert cache.nbytes == 1024 * 2 * 7 * 8
    cache.reserve(3000)
    assert cache.groups[0].size == 3000
    cache.reserve(3001)
    assert cache.groups[0].size == 6000
    model = new_model("llama", max_position_embeddings=10**9)
    expected = reference(model, PROMPT, 3)
    decoding = Engine(TransformersTarget(model)).start(PROMPT, 10**9)
    with decoding.sequence.context.target.active():
        decoding.prefill()
        steps = [decoding.step().tokens[0] for _ in range(3)]
    assert steps == expected
    assert decoding.sequence.context.cache.nbytes == 1024 * 3 * 2 * 2 * 8 * 8


@pytest.mark.few(1)
@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_native_layers_follow(family: str, tmp_path: Path) -> None:
    """Which hold the slots' addresses; and an adapter in one call, which has a cache of its own."""
    sizes = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = new_model(family, torch.float32, **sizes)
    expected = reference(model, PROMPT, NEW)
    target = target_for(model, execution="native")
    for drafter in ("none", "lookahead", "kangaroo"):
        for options in settings_of(drafter, target, tmp_path)[:2]:
            assert Engine(target, None, options, max_rows=12).generate(PROMPT, NEW).token_ids == expected
