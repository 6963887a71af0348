"""DFlash's and DSpark's layers by the library: the numbers of torch's operations, and the same texts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.heads.block_step import BlockStep
from drafters.heads.config import BlockConfig
from drafters.heads.head_step import Guess
from drafters.heads.loading import load_head
from drafters.heads.native_block import NativeBlock
from drafters.heads.weights import FORMAT
from drafters.heads.weights import Block as BlockWeights
from drafters.shared.own_cache import Nodes
from drafters.shared.vocabulary import DraftVocabulary
from specdec import Engine, SamplingParams
from specdec.drafting.registry import make_drafter
from specdec.native import library as native
from tests import heads, seam
from tests.models import VOCAB, prompt_of
from tests.other_instructions import level
from tests.unit.drafters.test_native_chain import SIZE, _wide_heads, target_of

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
__all__ = ["_wide_heads", "level"]

BLOCK, TAPS, NEW = 5, 2, 30
Made = Callable[[], tuple[dict[str, Any], heads.Tensors]]


def made(**switches: Any) -> tuple[dict[str, Any], heads.Tensors]:
    """A head with random weights, in specdec's own format."""
    random, taps = heads.Random(6), list(range(TAPS))
    sizes = {"heads": 4, "key_heads": 2, "head_dim": 16, "intermediate_size": 48, "layers": 2, "taps": taps}
    config = BlockConfig(
        hidden_size=SIZE, width=SIZE, vocab_size=VOCAB, target="", rope={"rope_theta": 10000.0}, block_size=BLOCK,
        mask_token=1, **{"kind": "dflash", **sizes, **switches},
    )  # fmt: skip
    tensors = {
        name: random.norm(*tensor.shape) if "norm" in name else random.matrix(*tensor.shape, gain=2.0)
        for name, tensor in BlockWeights(config).state_dict().items()
    }
    if config.draft_vocab:
        order = torch.randperm(VOCAB, generator=random._generator)
        tensors["draft_tokens"] = order[: config.draft_vocab].sort().values
    return {"format": FORMAT, **asdict(config)}, tensors


BIASES = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias", "fc_bias"), True)
WINDOW = {"windows": [3, 0]}
KINDS: dict[str, Made] = {
    "dflash": lambda: heads.dflash(SIZE, VOCAB),
    "dspark": lambda: heads.dflash(SIZE, VOCAB, kind="dspark", markov="vanilla", draft=17, own=True),
    "biases": lambda: made(**BIASES, from_anchor=True, own_head=True, draft_vocab=17),
    "window": lambda: made(**WINDOW, qk_norm=True),
    "causal window": lambda: made(**WINDOW, window_causal=True),
    "window from the anchor": lambda: made(**WINDOW, window_from_anchor=True),
    "causal window from the anchor": lambda: made(**WINDOW, window_from_anchor=True, window_causal=True),
}


def steps(
    kind: str, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch, target: Any = None
) -> list[BlockStep]:
    """The head by the library and by torch."""
    target = target or target_of(dtype)
    head: Any = load_head(heads.write(folder, *KINDS[kind]()), "dflash", target, check_target=False).to("cpu", dtype)
    vocabulary = DraftVocabulary(head.draft_tokens, target)
    found = [BlockStep(head, vocabulary.head, target, 4)]
    with monkeypatch.context() as patch:
        patch.setattr(NativeBlock, "of", lambda *_: None)
        found.append(BlockStep(head, vocabulary.head, target, 4))
    assert [one.native is None for one in found] == [False, True]
    return found


class Text:
    """One sequence in a head, and hidden states of a target for its text."""

    def __init__(self, step: BlockStep, seed: int) -> None:
        self.step, self.own = step, seam.beside(step.specs, capacity=40, rows=40)
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(40, TAPS * SIZE, generator=generator).to(step.dtype)

    def next(self, rows: int) -> torch.Tensor:
        return self.features[self.own.length :][:rows]

    def absorb(self, *chunks: int) -> None:
        for rows in chunks:
            self.step.absorb(self.own.rows(range(rows)), self.next(rows))
            self.own.commit(range(rows))

    def blank(self, rows: int) -> Nodes:
        return Nodes(self.own.rows([0] * rows + self.step.tokens(3 + rows)), self.next(rows))

    def stored(self) -> list[torch.Tensor]:
        """Keys and values of the text, of all layers."""
        return [part.clone() for part in self.own.stored()]


def told(guesses: list[Guess]) -> list[torch.Tensor]:
    return [part for guess in guesses for part in (guess.states, guess.logits)]


def passes(step: BlockStep, chunks: tuple[int, ...] = (7, 4)) -> list[torch.Tensor]:
    """Of two sequences: blocks at the text's beginning, behind a prompt, and behind rows that were accepted."""
    texts = [Text(step, seed) for seed in range(2)]
    found = told(step.guess([texts[0].blank(2)]))
    texts[0].absorb(*chunks)
    for sizes in ((1, 2), (3, 1)):
        found += told(step.guess([text.blank(size) for text, size in zip(texts, sizes, strict=True)]))
        for text, size in zip(texts, sizes, strict=True):
            text.own.commit(range(size))
    return found + [part for text in texts for part in text.stored()]


def compare(made: list[BlockStep]) -> None:
    """The library's numbers and torch's."""
    ours, theirs = map(passes, made)
    assert len(ours) == len(theirs) == 2 + 2 * 4 + 2 * 4
    for own, other in zip(ours, theirs, strict=True):
        close = 1e-5 if own.dtype is torch.float32 else 0.06  # both round each step to bfloat16, in other places
        torch.testing.assert_close(own.float(), other.float(), rtol=0, atol=close * float(other.abs().max()))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_torch(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(steps(kind, dtype, tmp_path, monkeypatch))


def alike(step: BlockStep) -> None:
    """Threads, chunks of text and other sequences change no bit of a sequence's numbers."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        usual = passes(step)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert all(map(torch.equal, usual, passes(step)))
    finally:
        torch.set_num_threads(threads)
    for chunks in ((11,), (1,) * 11, (2, 9)):
        assert all(map(torch.equal, usual, passes(step, chunks)))
    together = [Text(step, seed) for seed in range(3)]
    for text, rows in zip(together, (9, 0, 20), strict=True):
        text.absorb(*[rows] * (rows > 0))
    found = step.guess([text.blank(rows) for text, rows in zip(together, (1, 4, 2), strict=True)])
    for place, (before, rows) in enumerate(((9, 1), (0, 4), (20, 2))):
        alone = Text(step, place)
        alone.absorb(*[before] * (before > 0))
        assert all(map(torch.equal, told(step.guess([alone.blank(rows)])), told([found[place]])))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dspark", "biases", "window", "causal window from the anchor"])
def test_no_bit_depends_on_threads_chunks_or_other_sequences(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike(steps(kind, dtype, tmp_path, monkeypatch)[0])


def test_a_row_of_a_block_sees_what_its_layer_shows_it() -> None:
    """Of a block of five at positions 4 to 8, with a window of 3."""
    seen = {
        "window": [(1, 8), (2, 9), (3, 9), (4, 9), (5, 9)],
        "causal window": [(1, 5), (2, 6), (3, 7), (4, 8), (5, 9)],
        "window from the anchor": [(1, 9)] * 5,
        "causal window from the anchor": [(1, 5), (1, 6), (1, 7), (1, 8), (1, 9)],
    }
    for kind, spans in seen.items():
        config = BlockConfig(**{name: value for name, value in KINDS[kind]()[0].items() if name != "format"})
        assert config.spans(0, 9) == spans
        assert config.spans(1, 9) == [(0, 9)] * 5
        assert config.spans(0, 5)[0][0] == 0


def test_convolutions_are_left_to_torch(tmp_path: Path) -> None:
    folder = heads.write(tmp_path, *heads.dflash(SIZE, VOCAB, kind="dflash2"))
    drafter: Any = make_drafter(
        {"name": "dflash", "head": str(folder), "check_target": False}, target_of(torch.float32)
    )
    assert drafter.step.native is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dspark", "window"])
def test_texts_and_drafts_are_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(torch.float32)
    folder = heads.write(tmp_path, *KINDS[kind]())
    settings = {"name": "dflash", "head": str(folder), "min_chance": 0.0, "rows": 9, "check_target": False}
    samplings = [
        None,
        SamplingParams(temperature=0.9, seed=2, acceptance="match"),
        SamplingParams(temperature=0.9, seed=2, acceptance="reject"),
    ]
    found, prompt = [], prompt_of(9)
    for way in ("native", "torch"):
        drafter: Any = make_drafter(settings, target)
        assert isinstance(drafter.step.native, NativeBlock) == (way == "native")
        engine = Engine(target, None, drafter, max_rows=24)
        found.append([engine.generate(prompt, NEW, sampling) for sampling in samplings])
        monkeypatch.setattr(NativeBlock, "of", lambda *_: None)
    for one, other in zip(*found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.acceptance_lengths == other.stats.acceptance_lengths
    plain = Engine(target)
    assert found[0][0].token_ids == plain.generate(prompt, NEW).token_ids
    assert found[0][1].token_ids == plain.generate(prompt, NEW, samplings[1]).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_other_instructions_give_the_same_numbers(
    level: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of torch, and no bit depends on threads, chunks or other sequences."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith(("specdec.", "drafters.")) and (
            getattr(module, "library", None) is native.library
        ):
            monkeypatch.setattr(module, "library", lambda: level)
    for dtype in (torch.float32, torch.bfloat16):
        both = steps(kind, dtype, tmp_path / str(dtype), monkeypatch, target_of.__wrapped__(dtype))
        compare(both)
        alike(both[0])
