"""Recorded passes of EAGLE and DFlash heads by a CUDA device's kernels, interpreted by Triton, against torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.block_step import BlockStep
from drafters.heads.chain_step import ChainStep
from drafters.heads.loading import load_head
from drafters.shared.own_cache import Nodes
from drafters.shared.vocabulary import DraftVocabulary
from tests import heads, seam
from tests.models import VOCAB, prompt_of
from tests.property.test_batch_invariance import SMALL, target_of

SIZE = SMALL["hidden_size"]
KINDS: dict[str, Any] = {
    "eagle1": lambda: heads.eagle1(SIZE, VOCAB),
    "eagle3": lambda: heads.eagle3(
        SIZE, VOCAB, taps=(0,), draft=17, sliding_window=5, layer_types=["sliding_attention"], use_sliding_window=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_passes_are_torch_s_but_for_rounding(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of text rows and of a tree's level; keys and values are in the slots in which torch's pass stores them."""
    target, recorder = target_of("llama", monkeypatch)
    config, tensors = KINDS[kind]()
    folder = heads.write(tmp_path, config, tensors)
    head: Any = load_head(folder, "eagle", target, check_target=False).to("cpu", torch.float16)
    step = ChainStep(head, DraftVocabulary(head.draft_tokens, target).head, target)
    assert step.recorded is not None
    generator, found = torch.Generator().manual_seed(2), list[list[torch.Tensor]]()
    features = torch.randn(11, SIZE * len(step.config.taps), generator=generator).half()
    states = torch.randn(3, SIZE, generator=generator).half()
    for recorded in (step.recorded, None):
        step.recorded = recorded
        own = seam.beside(step.specs, capacity=40, rows=16)
        parts = list[torch.Tensor]()
        for first, last in ((0, 9), (9, 11)):
            (guess,) = step.guess([Nodes(own.rows(prompt_of(last - first)), features[first:last])])
            parts += [guess.logits, guess.states]
            own.commit(range(last - first))
        tree = own.rows([4, 2, 9], [-1, 0, 0, 1], first=1)
        for stored in own.stored(1):
            stored[:, :, -1] = 0  # the root's
        (guess,) = step.guess([Nodes(tree, states=states, asked=3)])
        parts += [guess.logits, guess.states]
        parts += [stored[0] for stored in own.stored(4)]
        found.append(parts)
    assert len(recorder.replays) >= 3
    for own, other in zip(*found, strict=True):
        assert own.shape == other.shape
        assert (own - other).abs().max() <= 0.01 * other.abs().max()


@pytest.mark.slow
def test_each_row_of_a_block_sees_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts of different lengths, one of which is longer than what attention sums at once."""
    target, recorder = target_of("llama", monkeypatch)
    folder = heads.write(tmp_path, *heads.dflash(SIZE, VOCAB, taps=(0,)))
    head: Any = load_head(folder, "dflash", target, check_target=False).to("cpu", torch.float16)
    step = BlockStep(head, DraftVocabulary(head.draft_tokens, target).head, target, 4)
    assert step.recorded is not None
    found, before = list[list[torch.Tensor]](), len(recorder.replays)
    for recorded in (step.recorded, None):
        step.recorded, parts = recorded, list[torch.Tensor]()
        generator = torch.Generator().manual_seed(2)
        texts = [seam.beside(step.specs, capacity=90, rows=80) for _ in range(2)]
        step.absorb(texts[0].rows(range(67)), torch.randn(67, SIZE, generator=generator).half())
        texts[0].commit(range(67))
        for sizes in ((1, 3), (2, 5)):
            brought = list[Nodes]()
            for size, own in zip(sizes, texts, strict=True):
                features = torch.randn(size, SIZE, generator=generator).half()
                brought.append(Nodes(own.rows([0] * size + step.tokens(7)), features))
            parts += [part for guess in step.guess(brought) for part in (guess.states, guess.logits)]
            for size, own in zip(sizes, texts, strict=True):
                own.commit(range(size))
        found.append(parts)
    assert len(recorder.replays) > before
    for own, other in zip(*found, strict=True):
        assert (own - other).abs().max() <= 0.01 * other.abs().max()
