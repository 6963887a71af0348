"""DFlash's and DSpark's passes as graphs, on a device that is not there, against passes that are launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.block_step import BlockStep
from drafters.heads.loading import load_head
from drafters.shared.own_cache import Nodes
from drafters.shared.vocabulary import DraftVocabulary
from specdec import Target, TransformersTarget
from tests import heads, seam
from tests.launching import Recorder, fused, launch
from tests.models import VOCAB, new_model

SIZE = 32
KINDS: dict[str, Callable[[], tuple[dict[str, Any], heads.Tensors]]] = {
    "dflash": lambda: heads.dflash(SIZE, VOCAB),
    "own embedding": lambda: heads.dflash(SIZE, VOCAB, own=True, block=4),
    "dspark": lambda: heads.dflash(SIZE, VOCAB, draft=17, markov="vanilla"),
}
LAUNCHED: dict[str, Callable[[], tuple[dict[str, Any], heads.Tensors]]] = {
    "convolutions": lambda: heads.dflash(SIZE, VOCAB, kind="dflash2"),
    "window": lambda: heads.dflash(
        SIZE, VOCAB, sliding_window=4, layer_types=["full_attention", "sliding_attention"], use_sliding_window=True
    ),
}
DTYPE = torch.float64


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return launch(monkeypatch)


def step_of(made: tuple[dict[str, Any], heads.Tensors], folder: Path, target: Target) -> BlockStep:
    head: Any = load_head(heads.write(folder, *made), "dflash", target, check_target=False).to("cpu", DTYPE)
    return BlockStep(head, DraftVocabulary(head.draft_tokens, target).head, target, head.config.drafted)


def passes(step: BlockStep) -> list[torch.Tensor]:
    """Of two texts, together and alone: new rows of each, and a block; the last has more rows than are recorded."""
    texts = [seam.beside(step.specs, capacity=60, rows=30) for _ in range(2)]
    generator, found = torch.Generator().manual_seed(3), list[torch.Tensor]()
    for sizes in ((3, 1), (1,), (2, 4), (1, step.config.block_size), (step.config.block_size + 1,)):
        brought = list[Nodes]()
        for number, (size, own) in enumerate(zip(sizes, texts, strict=False)):
            tokens = [0] * size + step.tokens(5 + number)
            features = torch.randn(size, 2 * SIZE, generator=generator, dtype=DTYPE)
            brought.append(Nodes(own.rows(tokens), features))
        for guess in step.guess(brought):
            found += [guess.states, guess.logits]
        for size, own in zip(sizes, texts, strict=False):
            own.commit(range(size))
    return [*found, *(texts[0].stored()[layer][0] for layer in (0, len(step.specs)))]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_those_that_are_launched(kind: str, tmp_path: Path, recorder: Recorder) -> None:
    recorded = step_of(KINDS[kind](), tmp_path, fused(new_model("llama", DTYPE)))
    launched = step_of(KINDS[kind](), tmp_path, TransformersTarget(new_model("llama", DTYPE)))
    assert recorded.recorded is not None
    assert launched.recorded is None
    before = sum(recorder.replays.values())
    ours, theirs = passes(recorded), passes(launched)
    assert sum(recorder.replays.values()) - before == 4
    assert len(ours) == len(theirs) == 18
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).abs().max() < 1e-11


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", LAUNCHED)
def test_heads_with_windows_or_convolutions_are_launched(kind: str, tmp_path: Path, recorder: Recorder) -> None:
    assert step_of(LAUNCHED[kind](), tmp_path, fused(new_model("llama", DTYPE))).recorded is None


def test_a_warm_up_records_all_passes(tmp_path: Path, recorder: Recorder) -> None:
    step = step_of(KINDS["dflash"](), tmp_path, fused(new_model("llama", DTYPE)))
    step.warm_up(2)
    made = len(recorder.made)
    assert made
    passes(step)
    assert len(recorder.made) == made
