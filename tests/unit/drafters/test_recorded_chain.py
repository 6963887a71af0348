"""EAGLE's passes as graphs, on a device that is not there, against passes that are launched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.heads.chain_step import ChainStep
from drafters.heads.head_step import Guess
from drafters.heads.loading import load_head
from drafters.shared.own_cache import Nodes
from drafters.shared.vocabulary import DraftVocabulary
from specdec import Engine, TransformersTarget
from specdec.drafting.registry import make_drafter
from specdec.errors import SpecdecWarning
from specdec.step import device_copies
from tests import heads, seam
from tests.launching import Kernels, Recorder, fused, launch
from tests.models import VOCAB, new_model, prompt_of
from tests.unit.runners.test_launches import Launches

SIZE = 32
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention"], "use_sliding_window": True}
KINDS: dict[str, Callable[[], tuple[dict[str, Any], heads.Tensors]]] = {
    "eagle1": lambda: heads.eagle1(SIZE, VOCAB),
    "eagle3": lambda: heads.eagle3(SIZE, VOCAB, draft=17),
    "from the norm": lambda: heads.eagle3(SIZE, VOCAB, bias=True, norm_before_residual=True, embedding=True),
    "eagle3.1": lambda: heads.eagle3(SIZE, VOCAB, norms="each", norm_output=True),
    "window": lambda: heads.eagle3(SIZE, VOCAB, draft=17, norms="whole", **WINDOW),
    "peagle": lambda: heads.peagle(SIZE, VOCAB),
}
DTYPE = torch.float64


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return launch(monkeypatch)


def both(kind: str, folder: Path, dtype: torch.dtype = DTYPE) -> list[ChainStep]:
    """The head with its passes recorded, and launched by a target that records nothing."""
    config, tensors = KINDS[kind]()
    path, made = heads.write(folder, config, tensors), list[ChainStep]()
    for target in (fused(new_model("llama", dtype)), TransformersTarget(new_model("llama", dtype))):
        head: Any = load_head(path, "eagle", target, check_target=False).to("cpu", dtype)
        made.append(ChainStep(head, DraftVocabulary(head.draft_tokens, target).head, target))
    assert [step.recorded is not None for step in made] == [True, False]
    return made


class Texts:
    """Two texts of different lengths in a head."""

    def __init__(self, step: ChainStep, kind: str) -> None:
        self.step, self.taps = step, 1 if kind == "eagle1" else 3
        self.each = [seam.beside(step.specs, capacity=40, rows=16) for _ in range(2)]
        self.found = list[torch.Tensor]()
        self._generator = torch.Generator().manual_seed(1)

    def features(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, SIZE * self.taps, generator=self._generator, dtype=torch.float64).to(self.step.dtype)

    def run(self, *nodes: Nodes) -> list[Guess]:
        guesses = self.step.guess(nodes)
        self.found += [part for guess in guesses for part in (guess.logits, guess.states)]
        return guesses


def passes(texts: Texts) -> list[torch.Tensor]:
    """Text rows of both, a level of a tree and the next token of a chain, a level below; then text again."""
    for sizes in ((7, 4), (1, 2), (3, 16)):
        rows = [
            Nodes(own.rows(prompt_of(size)), texts.features(size)) for own, size in zip(texts.each, sizes, strict=True)
        ]
        two, one = texts.run(*rows)
        for own, size in zip(texts.each, sizes, strict=True):
            own.commit(range(size - 1))
        siblings = texts.each[0].rows(torch.tensor([3, 7]), [-1, 0, 0], first=1)
        (wide,) = texts.run(Nodes(siblings, states=two.states.expand(2, -1), asked=2))
        (chain,) = texts.run(Nodes(texts.each[1].rows([5], first=1), states=one.states))
        deeper = texts.each[0].rows([4, 2, 9], [-1, 0, 0, 1, 2, 2], first=3)
        last = Nodes(texts.each[1].rows(torch.tensor([8]), first=2), states=chain.states)
        texts.run(Nodes(deeper, states=wide.states[[0, 1, 1]], asked=3), last)
        for own in texts.each:
            own.commit([0])
    return texts.found


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_those_that_are_launched(kind: str, tmp_path: Path, recorder: Recorder) -> None:
    recorded, launched = both(kind, tmp_path)
    before = sum(recorder.replays.values())
    ours, theirs = passes(Texts(recorded, kind)), passes(Texts(launched, kind))
    assert sum(recorder.replays.values()) - before == 12
    assert len(ours) == len(theirs) == 36
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).abs().max() < 1e-11


def test_all_depths_are_recorded_as_one_pass(tmp_path: Path, recorder: Recorder) -> None:
    """Masks stand behind the text, and what they read is fused in the graph."""
    found = list[list[torch.Tensor]]()
    for step in both("peagle", tmp_path):
        texts, features = Texts(step, "peagle"), torch.ones(3, 3 * SIZE, dtype=DTYPE)
        assert step.mask_state is not None
        masks = step.mask_state.expand(4, -1)
        (guess,) = texts.run(Nodes(texts.each[0].rows([3, 4, 5, 0, 0, 0, 0]), features, masks, asked=5))
        assert guess.logits.shape == (5, VOCAB)
        found.append(texts.found)
    assert sum(recorder.replays.values())
    for own, other in zip(*found, strict=True):
        assert (own - other).abs().max() < 1e-11


def test_text_and_drafted_rows_together_and_many_rows_are_launched(tmp_path: Path, recorder: Recorder) -> None:
    found = list[list[torch.Tensor]]()
    for step in both("eagle3", tmp_path):
        texts = Texts(step, "eagle3")
        recorded = sum(recorder.replays.values())
        texts.run(Nodes(texts.each[0].rows(prompt_of(17)), texts.features(17)))
        (one,) = texts.run(Nodes(texts.each[1].rows(prompt_of(18)), texts.features(18)))
        for own in texts.each:
            own.commit(range(17))
        text, drafted = texts.each[0].rows([4]), texts.each[1].rows([5], first=1)
        texts.run(Nodes(text, texts.features(1)), Nodes(drafted, states=one.states))
        assert sum(recorder.replays.values()) == recorded
        found.append(texts.found)
    for own, other in zip(*found, strict=True):
        assert (own - other).abs().max() < 1e-11


def test_passes_in_half_precision_are_those_that_are_launched(tmp_path: Path, recorder: Recorder) -> None:
    step, _ = both("eagle3", tmp_path, torch.float16)
    ours = passes(Texts(step, "eagle3"))
    step.recorded = None
    for own, other in zip(ours, passes(Texts(step, "eagle3")), strict=True):
        assert (own - other).abs().max() <= 0.02 * other.abs().max()  # they round in other places


def test_a_pass_that_cannot_be_recorded_is_launched(tmp_path: Path, recorder: Recorder) -> None:
    recorded, launched = both("eagle3", tmp_path)
    recorder.fails = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(SpecdecWarning, match="no CUDA graph of 16 rows can be recorded: RuntimeError: operation not"):
        ours = passes(Texts(recorded, "eagle3"))
    assert recorded.recorded is not None
    assert str(recorded.recorded.failed).startswith("RuntimeError")
    for own, other in zip(ours, passes(Texts(launched, "eagle3")), strict=True):
        assert (own - other).abs().max() < 1e-11


@pytest.mark.few(1)
@pytest.mark.parametrize(("recorded", "each", "limit"), [(True, 10, 47), (False, 33, 107)])
def test_a_pass_is_ten_launches(
    recorded: bool, each: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chain of three tokens and the step that verifies it; and what they are where passes are launched."""
    mode, torch_s, passes = Launches(), Kernels(), list[int]()
    names = ("add_norm", "turn_and_store", "gate", "step_attention", "paths", "pick", "look_up", "walk")
    kernels = SimpleNamespace(**{name: mode.one(name, getattr(torch_s, name)) for name in names})
    kernels.segments_of = torch_s.segments_of
    recorder = launch(monkeypatch, kernels)
    monkeypatch.setattr(device_copies, "address", torch_s.address)
    record, guess = recorder.record, ChainStep.guess

    def one(work: Any) -> Any:
        outcome, replay = record(work)
        return outcome, mode.one("graph", replay)

    def counted(own: ChainStep, brought: Any) -> Any:
        known = len(mode.names)
        found = guess(own, brought)
        passes.append(len(mode.names) - known)
        return found

    monkeypatch.setattr(recorder, "record", one)
    monkeypatch.setattr(ChainStep, "guess", counted)
    target = fused(new_model("llama", DTYPE))
    folder = heads.write(tmp_path, *KINDS["from the norm"]())
    options = {"name": "eagle", "head": str(folder), "branch": 1, "tokens": 3, "min_chance": 0.0}
    drafter: Any = make_drafter(options, target)
    if not recorded:
        drafter.step.recorded = None
    decoding = Engine(target, None, drafter, max_rows=24, policy="off").start(prompt_of(9), 20)
    with target.active():
        decoding.prefill()
        for _ in range(2):
            decoding.step()
        mode.names.clear()
        passes.clear()
        with mode:
            decoding.step()
    assert mode.names.count("graph") == 1 + 3 * recorded
    assert len(passes) == 3
    assert max(passes) <= each, passes
    assert len(mode.names) <= limit, len(mode.names)
