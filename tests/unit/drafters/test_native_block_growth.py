"""Drafts that the library grows from a block: token by token, and chance by chance, those that Python grows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import Engine
from specdec.drafting.registry import make_drafter
from specdec.native import library as native
from tests import heads
from tests.models import prompt_of
from tests.other_instructions import level
from tests.unit.drafters import test_native_growth as growth
from tests.unit.drafters.test_native_block import KINDS, made
from tests.unit.drafters.test_native_chain import _wide_heads, target_of
from tests.unit.drafters.test_native_growth import ALWAYS, PAYING, SAMPLINGS, _cheap, alike, compare

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler")
__all__ = ["_cheap", "_wide_heads", "level"]

SPARK = {"kind": "dspark", "from_anchor": True, "markov": "vanilla", "markov_rank": 6}
MADE = {
    **KINDS,
    "bias alone": lambda: made(**SPARK),
    "confidence of the state": lambda: made(**SPARK, confidence="hidden", draft_vocab=17, own_head=True),
    "confidence without a bias": lambda: made(kind="dspark", confidence="hidden"),
}


class Both(growth.Both):
    """A sequence whose drafts two sessions make: one grows them in the library, one in Python."""

    def level_by_level(self, patch: pytest.MonkeyPatch) -> Any:
        with patch.context() as without:
            without.setattr(self.drafter, "_described", None)
            level = self.drafter.start(self.context)
        assert (self.grown._grows, level._grows) == (True, False)
        return level


def drafter_of(kind: str, dtype: torch.dtype, folder: Path, target: Any = None, **options: Any) -> Any:
    folder, target = heads.write(folder, *MADE[kind]()), target or target_of(dtype)
    found: Any = make_drafter({"name": "dflash", "head": str(folder), "check_target": False, **options}, target)
    found.step_target = target
    assert found.grows
    return found


CASES = [
    ("dspark", torch.bfloat16, "greedy", ALWAYS),
    ("dspark", torch.float32, "match", PAYING),
    ("dspark", torch.bfloat16, "cool", {"branch": 1, **ALWAYS}),
    ("dspark", torch.float32, "typical", {"rows": 11, "min_chance": 0.05}),
    ("bias alone", torch.bfloat16, "match", ALWAYS),
    ("bias alone", torch.float32, "greedy", PAYING),
    ("confidence of the state", torch.bfloat16, "match", {"branch": 2, **ALWAYS}),
    ("confidence of the state", torch.float32, "greedy", {"rows": 5, **PAYING}),
    ("confidence without a bias", torch.bfloat16, "greedy", ALWAYS),
    ("confidence without a bias", torch.float32, "match", PAYING),
    ("dflash", torch.bfloat16, "greedy", ALWAYS),
    ("dflash", torch.float32, "match", {"branch": 40, "tokens": 2, **ALWAYS}),
    ("biases", torch.float32, "cool", PAYING),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "dtype", "sampling", "options"), CASES)
def test_drafts_are_those_of_levels(
    kind: str, dtype: torch.dtype, sampling: str, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(drafter_of(kind, dtype, tmp_path, **options), SAMPLINGS[sampling], monkeypatch, [1, 2, 3], Both)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, usual = drafter_of("dspark", torch.bfloat16, tmp_path, **ALWAYS), torch.get_num_threads()
    both = Both(head, 7, SAMPLINGS["match"], monkeypatch)
    try:
        for _ in range(6):
            torch.set_num_threads(threads)
            grown = both.grown.propose(24)
            torch.set_num_threads(1)
            alike(grown, both.level.propose(24))
            both.observe(grown)
    finally:
        torch.set_num_threads(usual)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["dspark", "window"])
def test_texts_of_a_batch_are_those_without_drafts(kind: str, tmp_path: Path) -> None:
    target = target_of(torch.bfloat16)
    engine = Engine(target, None, drafter_of(kind, torch.bfloat16, tmp_path, **ALWAYS), max_rows=24)
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["match"]):
        prompts = [prompt_of(size) for size in (3, 9, 14)]
        texts = [text.token_ids for text in engine.generate_batch(prompts, 20, sampling)]
        assert texts == [Engine(target).generate(prompt, 20, sampling).token_ids for prompt in prompts]


def test_a_token_that_the_bias_does_not_know_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of("dspark", torch.float32, tmp_path, **ALWAYS)
    both = Both(drafter, 1, SAMPLINGS["greedy"], monkeypatch)
    drafter._described.vocabulary = both.context.root
    with pytest.raises(IndexError, match="specdec_grow_block has no embedding for one of its tokens"):
        both.grown.propose(9)


@pytest.mark.parametrize("changes", [{"markov": "gated"}, {"markov": "rnn"}, {"selector_rank": 4, "selector_top": 5}])
def test_other_corrections_are_left_to_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    corrections = {**SPARK, **changes} if "markov" in changes else {"kind": "dflash2", **changes}
    folder, target = heads.write(tmp_path, *made(**corrections)), target_of(torch.float32)
    drafter: Any = make_drafter({"name": "dflash", "head": str(folder), "check_target": False}, target)
    assert drafter.step.native is not None
    assert not drafter.grows


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dspark", "confidence of the state", "dflash"])
def test_other_instructions_grow_the_same_drafts(
    level: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python does by the same library, which is compiled for processors that have less."""
    for module in [*sys.modules.values()]:
        if getattr(module, "__name__", "").startswith(("specdec.", "drafters.")) and (
            getattr(module, "library", None) is native.library
        ):
            monkeypatch.setattr(module, "library", lambda: level)
    for dtype in (torch.float32, torch.bfloat16):
        target = target_of.__wrapped__(dtype)
        head = drafter_of(kind, dtype, tmp_path / str(dtype), target, **PAYING)
        for sampling in ("greedy", "match"):
            compare(head, SAMPLINGS[sampling], monkeypatch, [1, 2], Both)
