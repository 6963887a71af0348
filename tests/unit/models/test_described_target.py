"""A checkpoint as a target by its spec: whole texts are the model's own, and as a live model's layers give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec import SamplingParams, TransformersTarget
from specdec.drafting.registry import make_drafter
from specdec.errors import ConfigError
from specdec.models.described_target import DescribedTarget
from specdec.native.library import library
from tests import models
from tests.decoders import ALL
from tests.exactness.targets import engine_of

PROMPT, NEW = (3, 9, 4, 3, 9, 4, 11, 3, 9), 24
DRAFTERS = ("prompt_lookup", "lookahead", "token_recycling", "kangaroo", "medusa", "jacobi")


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ALL)
def test_texts_are_those_of_generate(family: str, tmp_path: Path) -> None:
    """By each drafter in turn; windows, experts and soft caps among the families."""
    model = models.new_model(family)
    model.save_pretrained(tmp_path / "model")
    target = DescribedTarget(tmp_path / "model")
    drafter = DRAFTERS[ALL.index(family) % len(DRAFTERS)]
    (tmp_path / "drafter").mkdir()
    settings = models.settings_of(drafter, target, tmp_path / "drafter")[0]
    found = engine_of(target, make_drafter(settings, target), max_rows=24).generate(PROMPT, NEW)
    assert [*found.token_ids] == models.reference(model, PROMPT, NEW)


@pytest.mark.skipif(library() is None, reason="no C compiler works here")
@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.9, seed=5)])
def test_native_texts_are_those_of_a_live_models_layers(sampling: SamplingParams | None, tmp_path: Path) -> None:
    models.new_model("qwen3", torch.float32).save_pretrained(tmp_path)
    texts = []
    for kind in (TransformersTarget.from_pretrained, DescribedTarget):
        engine = engine_of(kind(tmp_path, execution="native"), "token_recycling", max_rows=24)
        texts.append([*engine.generate(PROMPT, NEW, sampling).token_ids])
    assert texts[0] == texts[1]


def test_what_it_is_is_told(tmp_path: Path) -> None:
    models.new_model("gemma3", torch.bfloat16, eos_token_id=[5, 7]).save_pretrained(tmp_path)
    target = DescribedTarget(tmp_path)
    assert (target.dtype, target.eos_ids, target.context_length) == (torch.bfloat16, {5, 7}, 256)
    assert target.describe()["execution"] == {"runner": "torch", "batch-invariant": "no"}
    live = TransformersTarget.from_pretrained(tmp_path)
    assert (target.name, target.layer_weights, target.specs) == (live.name, live.layer_weights, live.specs)


def test_what_the_library_does_not_run_is_refused(tmp_path: Path) -> None:
    models.new_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="execution='native' cannot run this model: native layers compute in"):
        DescribedTarget(tmp_path, execution="native")
