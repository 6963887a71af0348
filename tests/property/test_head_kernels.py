"""Recorded passes of EAGLE and DFlash heads by a CUDA device's kernels, interpreted by Triton, against torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.block_step import Blank, BlockStep
from drafters.heads.chain_step import ChainStep, Nodes
from drafters.heads.loading import load_head
from drafters.shared.vocabulary import DraftVocabulary
from specdec.step.block import Block
from specdec.step.cache import KVCache
from tests import heads
from tests.models import VOCAB, prompt_of
from tests.property.test_batch_invariance import SMALL, target_of

SIZE = SMALL["hidden_size"]
KINDS: dict[str, Any] = {
    "eagle1": lambda: heads.eagle1(SIZE, VOCAB),
    "eagle3": lambda: heads.eagle3(
        SIZE, VOCAB, taps=(0,), draft=17, sliding_window=5, layer_types=["sliding_attention"], use_sliding_window=True
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_torch_s_but_for_rounding(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text rows and of a tree's level; keys and values are in the slots in which torch's pass stores them."""
    target, recorder = target_of("llama", monkeypatch)
    config, tensors = KINDS[kind]()
    folder = heads.write(tmp_path, config, tensors)
    head: Any = load_head(folder, "eagle", target, check_target=False).to("cpu", torch.float16)
    step = ChainStep(head, DraftVocabulary(head.draft_tokens, target).head, target)
    assert step.recorded is not None
    generator, found = torch.Generator().manual_seed(2), list[list[torch.Tensor]]()
    features = torch.randn(11, step.features, generator=generator).half()
    states = torch.randn(3, SIZE, generator=generator).half()
    for recorded in (step.recorded, None):
        step.recorded = recorded
        cache, place = KVCache(step.specs, capacity=40, rows=16), torch.device("cpu")
        parts = list[torch.Tensor]()
        for first, last in ((0, 9), (9, 11)):
            (guess,) = step.guess([Nodes(Block(cache, prompt_of(last - first), device=place), features[first:last])])
            parts += [guess.logits, guess.states]
            cache.commit(range(last - first))
        tree = Block(cache, [4, 2, 9], parents=[-1, 0, 0, 1], depths=[0, 1, 1, 2], first=1, device=place)
        cache.write(0, torch.zeros(1, 2, 1, 8).half(), torch.zeros(1, 2, 1, 8).half(), cache.length)  # the root's
        (guess,) = step.guess([Nodes(tree, states=states, asked=3)])
        parts += [guess.logits, guess.states]
        parts += [stored[0][0, :, : cache.length + 4] for stored in (cache.keys, cache.values)]
        found.append(parts)
    assert len(recorder.replays) >= 3
    for own, other in zip(*found, strict=True):
        assert own.shape == other.shape
        assert (own - other).abs().max() <= 0.01 * other.abs().max()


def test_each_row_of_a_block_sees_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts of different lengths, one of which is longer than what attention sums at once."""
    target, recorder = target_of("llama", monkeypatch)
    folder = heads.write(tmp_path, *heads.dflash(SIZE, VOCAB, taps=(0,)))
    head: Any = load_head(folder, "dflash", target, check_target=False).to("cpu", torch.float16)
    step, here = BlockStep(head, DraftVocabulary(head.draft_tokens, target).head, target, 4), torch.device("cpu")
    assert step.recorded is not None
    found, before = list[list[torch.Tensor]](), len(recorder.replays)
    for recorded in (step.recorded, None):
        step.recorded, parts = recorded, list[torch.Tensor]()
        generator = torch.Generator().manual_seed(2)
        caches = [KVCache(step.specs, capacity=90, rows=80) for _ in range(2)]
        step.absorb(Block(caches[0], range(67), device=here), torch.randn(67, SIZE, generator=generator).half())
        caches[0].commit(range(67))
        for sizes in ((1, 3), (2, 5)):
            brought = list[Blank]()
            for size, cache in zip(sizes, caches, strict=True):
                features = torch.randn(size, SIZE, generator=generator).half()
                brought.append(Blank(Block(cache, [0] * size + step.tokens(7), device=here), features))
            parts += [part for sequel in step.run(brought) for part in (sequel.hidden, sequel.logits)]
            for size, cache in zip(sizes, caches, strict=True):
                cache.commit(range(size))
        found.append(parts)
    assert len(recorder.replays) > before
    for own, other in zip(*found, strict=True):
        assert (own - other).abs().max() <= 0.01 * other.abs().max()
