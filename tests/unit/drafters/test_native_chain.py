"""EAGLE's layer by the native library: the numbers of torch's operations, and the same texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.chain_step import ChainStep
from drafters.heads.config import ChainConfig
from drafters.heads.head_step import Guess
from drafters.heads.loading import load_head
from drafters.heads.native_chain import NativeChain
from drafters.heads.weights import FORMAT, Chain
from drafters.shared.own_cache import Nodes
from drafters.shared.vocabulary import DraftVocabulary
from specdec import Engine, SamplingParams
from specdec.drafting.registry import make_drafter
from specdec.models.transformers_target import TransformersTarget
from specdec.native import library as native
from tests import heads, seam
from tests.models import VOCAB, new_model, prompt_of, target_for

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
SIZE, PROMPT, NEW = 32, prompt_of(9), 30
Made = Callable[[], tuple[dict[str, Any], heads.Tensors]]
KINDS: dict[str, Made] = {
    "eagle1": lambda: heads.eagle1(SIZE, VOCAB),
    "eagle3": lambda: heads.eagle3(SIZE, VOCAB, draft=17),
    "from the norm": lambda: heads.eagle3(SIZE, VOCAB, bias=True, norm_before_residual=True, embedding=True),
    "eagle3.1": lambda: heads.eagle3(SIZE, VOCAB, norms="each", norm_output=True),
    "window": lambda: heads.eagle3(
        SIZE, VOCAB, draft=17, sliding_window=3, layer_types=["sliding_attention"], use_sliding_window=True
    ),
    "trained": lambda: trained(),
}


def trained() -> tuple[dict[str, Any], heads.Tensors]:
    """The kind that `specdec train eagle3` makes, in specdec's own format, with the target's embedding and head."""
    random = heads.Random(4)
    sizes = {"heads": 4, "key_heads": 2, "head_dim": 16, "intermediate_size": 48, "layers": 1, "taps": [0, 1, 2]}
    switches = {"norm_inputs": "each", "norm_before_residual": True, "norm_output": True, "draft_vocab": 17}
    config = ChainConfig(
        kind="eagle3", hidden_size=SIZE, width=SIZE, vocab_size=VOCAB, target="", rope={"rope_theta": 10000.0},
        **sizes, **switches,
    )  # fmt: skip
    head = Chain(config, 3)
    tensors = {
        name: random.norm(*tensor.shape) if tensor.ndim == 1 else random.matrix(*tensor.shape, gain=2.0)
        for name, tensor in head.state_dict().items()
    }
    tensors["draft_tokens"] = torch.randperm(VOCAB, generator=random._generator)[:17].sort().values
    return {"format": FORMAT, **asdict(config)}, tensors


@pytest.fixture(autouse=True)
def _wide_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 16 values, which native layers need."""
    monkeypatch.setitem(heads.WIDTHS, "head_dim", 16)


@cache
def target_of(dtype: torch.dtype) -> TransformersTarget:
    return target_for(new_model("llama", dtype, head_dim=16), execution="native")


def steps(kind: str, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[ChainStep]:
    """The head by the library and by torch."""
    target = target_of(dtype)
    head: Any = load_head(heads.write(folder, *KINDS[kind]()), "eagle", target, check_target=False).to("cpu", dtype)
    vocabulary = DraftVocabulary(head.draft_tokens, target)
    made = [ChainStep(head, vocabulary.head, target)]
    monkeypatch.setattr(NativeChain, "of", lambda *_: None)
    made.append(ChainStep(head, vocabulary.head, target))
    assert [one.native is None for one in made] == [False, True]
    return made


def told(guesses: list[Guess]) -> list[torch.Tensor]:
    return [part.float() for guess in guesses for part in (guess.logits, guess.states)]


def passes(step: ChainStep, kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of two sequences of different lengths: their text, a level of a tree, and one below that; then text again."""
    generator, taps = torch.Generator().manual_seed(1), 1 if kind == "eagle1" else 3
    texts = [seam.beside(step.specs, capacity=32, rows=16) for _ in range(2)]
    found = list[torch.Tensor]()

    def features(rows: int) -> torch.Tensor:
        return torch.randn(rows, SIZE * taps, generator=generator).to(dtype)

    def run(nodes: list[Nodes]) -> list[Guess]:
        guesses = step.guess(nodes)
        found.extend(told(guesses))
        return guesses

    for sizes in ((7, 4), (1, 2)):
        both = [*zip(texts, sizes, strict=True)]
        two, one = run([Nodes(own.rows(prompt_of(size)), features(size)) for own, size in both])
        for own, size in both:
            own.commit(range(size - 1))
        siblings = texts[0].rows([3, 7], [-1, 0, 0], first=1)
        level = [
            Nodes(siblings, states=two.states.expand(2, -1), asked=2),
            Nodes(texts[1].rows([5], first=1), states=one.states),
        ]
        wide, chain = run(level)
        deeper = texts[0].rows([4, 2, 9], [-1, 0, 0, 1, 2, 2], first=3)
        below = [
            Nodes(deeper, states=wide.states[[0, 1, 1]], asked=3),
            Nodes(texts[1].rows([8], first=2), states=chain.states),
        ]
        run(below)
        for own in texts:
            own.commit([0])
    return found


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_torch(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = steps(kind, dtype, tmp_path, monkeypatch)
    assert (made[0].config.window(0) is None) == (kind != "window")
    ours, theirs = (passes(step, kind, dtype) for step in made)
    assert len(ours) == len(theirs) == 24
    for own, other in zip(ours, theirs, strict=True):
        close = 1e-5 if dtype is torch.float32 else 0.06  # both round each step to bfloat16, in other places
        torch.testing.assert_close(own, other, rtol=0, atol=close * float(other.abs().max()))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_texts_and_drafts_are_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(torch.float32)
    folder = heads.write(tmp_path, *KINDS[kind]())
    settings = {"name": "eagle", "head": str(folder), "min_chance": 0.0, "rows": 9, "check_target": False}
    samplings = [
        None,
        SamplingParams(temperature=0.9, seed=2, acceptance="match"),
        SamplingParams(temperature=0.9, seed=2, acceptance="reject"),
    ]
    found = []
    for way in ("native", "torch"):
        drafter: Any = make_drafter(settings, target)
        assert isinstance(drafter.step.native, NativeChain) == (way == "native")
        engine = Engine(target, None, drafter, max_rows=24)
        found.append([engine.generate(PROMPT, NEW, sampling) for sampling in samplings])
        monkeypatch.setattr(NativeChain, "of", lambda *_: None)
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.acceptance_lengths == other.stats.acceptance_lengths
    plain = Engine(target)
    assert found[0][0].token_ids == plain.generate(PROMPT, NEW).token_ids
    assert found[0][1].token_ids == plain.generate(PROMPT, NEW, samplings[1]).token_ids


def test_rows_do_not_depend_on_the_rows_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sequences together, each has the numbers that it has alone, bit for bit."""
    step, _ = steps("eagle3", torch.float32, tmp_path, monkeypatch)
    hidden = torch.randn(6, 3 * SIZE, generator=torch.Generator().manual_seed(3))

    def nodes(size: int) -> Nodes:
        return Nodes(seam.beside(step.specs, capacity=9, rows=9).rows(prompt_of(size)), hidden[:size], asked=2)

    together = step.guess([nodes(6), nodes(3)])
    for size, guess in zip((6, 3), together, strict=True):
        (alone,) = step.guess([nodes(size)])
        assert torch.equal(alone.logits, guess.logits)
