"""The default configuration: ``Engine.from_pretrained(path, drafter)`` and nothing else, as a newcomer has it.

Greedy texts in bfloat16 are only the same on any machine where no two logits are near, hence the models with a rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specdec import Engine, SamplingParams
from specdec.bench.shapes import write_rule
from specdec.drafting.registry import drafter_names
from tests.models import VOCAB, new_model, prompt_of, reference, settings_of
from tests.tiers import turns

# Family and dtype of the checkpoint; the dtype of the engine is the checkpoint's.
CHECKPOINTS = (
    ("llama", "float32"),
    ("mistral", "bfloat16"),
    ("gemma3", "float32"),
    ("qwen2", "bfloat16"),
    ("qwen3", "float32"),
    ("llama", "bfloat16"),
    ("mistral", "float32"),
    ("neox", "float32"),
)
PROMPTS = (prompt_of(7), prompt_of(40))
NEW = 40
SAMPLING = SamplingParams(temperature=1.0, seed=3, acceptance="match")


def add_tokenizer(folder: Path) -> None:
    """A word for each token; prompts are token ids, and no text is looked at."""
    words = WordLevel({f"word{token}": token for token in range(VOCAB)}, unk_token="word0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)


def model_of(family: str, dtype: str) -> PreTrainedModel:
    model = new_model(family, getattr(torch, dtype))
    if dtype == "bfloat16":
        write_rule(model)
    return model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str]], Engine]:
    """``loaded(checkpoint)``: the engine, loaded once."""

    @cache
    def load(checkpoint: tuple[str, str]) -> Engine:
        folder = tmp_path_factory.mktemp("checkpoint")
        model_of(*checkpoint).save_pretrained(folder)
        add_tokenizer(folder)
        return Engine.from_pretrained(folder)

    return load


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("drafter", "checkpoint"),
    turns(drafter_names(), CHECKPOINTS, always=lambda drafter, checkpoint: drafter == "none"),
)
def test_drafter_changes_no_token(
    drafter: str, checkpoint: tuple[str, str], loaded: Callable[[tuple[str, str]], Engine], tmp_path: Path
) -> None:
    plain = loaded(checkpoint)
    assert plain.target.dtype == getattr(torch, checkpoint[1])
    known = settings_of(drafter, plain.target, tmp_path)[:2]
    for config in tmp_path.glob("*/config.json"):
        add_tokenizer(config.parent)
    for settings in known:
        engine = plain.with_drafter(settings)
        for prompt in PROMPTS:
            out = engine.generate(prompt, NEW)
            assert out.token_ids == plain.generate(prompt, NEW).token_ids, settings
            if checkpoint[1] == "float32":
                sampled = engine.generate(prompt, NEW, SAMPLING)
                assert sampled.token_ids == plain.generate(prompt, NEW, SAMPLING).token_ids, settings


@pytest.mark.few(1)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids="-".join)
def test_text_is_that_of_generate(checkpoint: tuple[str, str], loaded: Callable[[tuple[str, str]], Engine]) -> None:
    model = model_of(*checkpoint)
    for prompt in PROMPTS:
        assert loaded(checkpoint).generate(prompt, NEW).token_ids == reference(model, prompt, NEW)
