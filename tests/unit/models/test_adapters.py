"""Adapters of peft, wherever they are in a model: the text is the tuned model's, or what changed is named."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import peft
import pytest
import torch

from specdec import Engine, PrefixCache, TransformersTarget, custom_generate
from specdec.errors import TargetError
from tests import models
from tests.tiers import each_once

PROMPT, NEW = models.prompt_of(9), 16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # that the native library has code for

CONFIGS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "around the layers": {"target_modules": ["embed_tokens", "lm_head"]},
    "dora": {"target_modules": ["down_proj", "embed_tokens"], "use_dora": True},
    "rslora": {"target_modules": ["v_proj", "embed_tokens"], "use_rslora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved norms": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [*PROMPT[:3]]},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        yield


def tuned_model(name: str, *, tied: bool = False) -> Any:
    """With two adapters, the second of which is not active."""
    model = models.new_model("llama", torch.float32, **SIZES, tie_word_embeddings=tied)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **CONFIGS[name])
    tuned: Any = peft.get_peft_model(model, config)
    tuned.add_adapter("second", config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight_name, weight in tuned.named_parameters():
            if any(part in weight_name for part in ("lora", "modules_to_save", "trainable_tokens")):
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return tuned.eval()


def text_of(model: Any, **options: Any) -> list[int]:
    return models.reference(getattr(model, "get_base_model", lambda: model)(), PROMPT, NEW, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "tied"), each_once(CONFIGS, (False, True)))
def test_an_adapter_anywhere_is_followed(name: str, tied: bool) -> None:
    tuned = tuned_model(name, tied=tied)
    expected = text_of(tuned)
    with tuned.disable_adapter():
        assert text_of(tuned) != expected
    for model in (tuned, tuned.get_base_model()):
        assert Engine(TransformersTarget(model), drafter="lookahead").generate(PROMPT, NEW).token_ids == expected
    loop = functools.partial(custom_generate, drafter="lookahead")
    assert text_of(tuned, custom_generate=loop) == expected


SWITCHES: dict[str, Callable[[Any], object]] = {
    "another is set": lambda model: model.set_adapter("second"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(),
    "merged and gone": lambda model: model.merge_and_unload(),
    "gone": lambda model: model.unload(),
    "the second alone": lambda model: (model.set_adapter("second"), model.delete_adapter("default")),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "switch"), each_once(("head", "around the layers", "saved", "tokens"), SWITCHES))
def test_an_adapter_that_is_switched_after_the_engine_was_built(name: str, switch: str) -> None:
    """Followed, also behind a prefix cache, or refused."""
    tuned = tuned_model(name)
    engine, cache = Engine(TransformersTarget(tuned)), PrefixCache()
    assert engine.generate(PROMPT, NEW, prefix_cache=cache).token_ids == text_of(tuned)
    SWITCHES[switch](tuned)
    expected = text_of(tuned)
    for kept in (cache, None):
        try:
            assert engine.generate(PROMPT, NEW, prefix_cache=kept).token_ids == expected
        except TargetError as refused:
            assert "was changed after its modules runner was made" in str(refused)  # noqa: PT017
            assert "gone" in switch
