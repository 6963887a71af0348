"""Every registered drafter, on every family, emits greedy decoding's own tokens: in float64 not one differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.rest.datastore import build_datastore
from specdec import Context, Engine, Generation, Observation
from specdec.drafting.registry import drafter_names
from tests import seam
from tests.fakes import Oracle, Spy
from tests.models import FAMILIES, FUSED, WINDOWS, greedy, model_of, prompt_of, reference, settings_of, target_of
from tests.tiers import once, turns

PROMPTS = [prompt_of(1), prompt_of(2), prompt_of(7), prompt_of(40)]
NEW = 50
# Few rows make small rings: a window's slots are used three times over in these texts.
SIZES = {"max_rows": 24, "prefill_chunk": 16}


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_read_off_the_model(family: str) -> None:
    """By what reads them; the model's own forward makes its masks of all keys."""
    whole = family not in FUSED
    assert (target_of(family).options["runner"] == "modules") == whole
    assert [spec.window for spec in target_of(family).specs] == ([None] * 3 if whole else WINDOWS[family])


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [*FAMILIES, "lfm2"])
def test_text_needs_every_layer_s_attention(family: str) -> None:
    """Otherwise equality would be cheap: noise for one layer's attention makes another text."""
    generator = torch.Generator().manual_seed(0)

    def noise(module: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.randn(given[0].shape, generator=generator, dtype=given[0].dtype) * given[0].std(),)

    model, text = model_of(family), greedy(family, PROMPTS[2], NEW)
    assert len(set(text)) > 8
    last = [module for name, module in model.named_modules() if name.endswith(ADDED)]
    assert len(last) == 3
    for output in last:
        hook = output.register_forward_pre_hook(noise)
        try:
            assert reference(model, PROMPTS[2], 8) != text[:8]
        finally:
            hook.remove()


ADDED = ("self_attn.o_proj", "attention.dense", "self_attn.out_proj", "conv.out_proj")
TEXT = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def __repr__(self):\n        return f'Point({self.x}, {self.y})'\n\n\n"
    "class Size:\n    def __init__(self, width, height):\n"
)


@pytest.fixture(scope="module")
def plain(tiny_engine: Engine) -> Generation:
    return tiny_engine.generate(TEXT, 40)


# Jacobi's guesses are seldom right on any text; tests/unit/drafters/test_jacobi.py has one on which they are. The
# package holds no head of others; test_heads_reference.py and test_mtp.py show that their guesses are right.
@pytest.mark.parametrize(
    "drafter", [name for name in drafter_names() if name not in ("none", "jacobi", "dflash", "eagle", "mtp")]
)
def test_every_drafter_has_drafts_accepted(
    tiny_engine: Engine, plain: Generation, drafter: str, tmp_path: Path
) -> None:
    """On a text that repeats itself, by the embedded model and the weights shipped for it; else equality is cheap."""
    options: dict[str, Any] = {"name": drafter}
    if drafter == "rest":
        (tmp_path / "corpus.txt").write_text(TEXT + plain.text, encoding="utf-8")
        store = build_datastore([tmp_path / "corpus.txt"], tiny_engine.tokenizer, tmp_path / "datastore")
        options["datastore"] = str(store.path)
    engine = Engine(tiny_engine.target, tiny_engine.tokenizer, options, costs=tiny_engine.costs)
    out = engine.generate(TEXT, 40, prediction=plain.text if drafter == "prediction" else None)
    assert out.token_ids == plain.token_ids
    assert out.stats.tokens_per_step > 1.2


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "execution"), [*once(FAMILIES, ("modules", "auto")), ("lfm2", "auto")])
def test_trees_around_the_truth(family: str, execution: str) -> None:
    """A drafter that knows the answer makes the engine accept blocks of every length out of scattered rows."""
    target = target_of(family, execution=execution if family in FUSED else "modules")  # others are run as a whole
    gathered, lengths = 0, set[int]()

    def note(context: Context, seen: Observation) -> None:
        nonlocal gathered
        assert len(seen.path) == len(seen.tokens)
        assert context.cache.length == len(context.tokens) - 1
        gathered += list(seen.path) != list(range(len(seen.path)))

    for prompt in PROMPTS:
        truth = greedy(family, prompt, NEW)
        oracle = Spy(Oracle([*prompt, *truth], target.vocab_size), on_seen=note)
        with seam.in_parts():
            out = Engine(target, None, oracle, **SIZES).generate(prompt, NEW)
        assert out.token_ids == truth
        lengths.update(out.stats.acceptance_lengths)
    assert gathered > 20
    assert lengths == {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", turns(drafter_names()))
def test_no_room_is_plain_decoding(drafter: str, tmp_path: Path) -> None:
    target = target_of("mistral")
    for settings in settings_of(drafter, target, tmp_path):
        out = Engine(target, None, settings, max_rows=1).generate(PROMPTS[2], 12)
        assert out.token_ids == greedy("mistral", PROMPTS[2], NEW)[:12]
        assert out.stats.rows == [1] * 12
