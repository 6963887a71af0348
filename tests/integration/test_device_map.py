"""Models split by accelerate's ``device_map``, as far as a CPU goes: the same text, wherever the weights lie."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from specdec import Engine, SamplingParams, TransformersTarget
from tests.models import OF_LAYERS, greedy, new_model, prompt_of, settings_of, target_of
from tests.tiers import FEW

PROMPT = prompt_of(11)
NEW = 24
SAMPLING = SamplingParams(temperature=1.0, seed=3, top_k=12, acceptance="match")
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    new_model("llama").save_pretrained(folder)
    return folder


@cache
def sampled() -> list[int]:
    return Engine(target_of("llama")).generate(PROMPT, NEW, SAMPLING).token_ids


def check(target: TransformersTarget, drafters: Iterable[Any] = ("none", "prompt_lookup", "lookahead")) -> None:
    """The first drafter greedily and drawing; the others, whose rows go through the same layers, in turns."""
    for number, drafter in enumerate(drafters):
        engine = Engine(target, None, drafter)
        if number % 2 == 0:
            assert engine.generate(PROMPT, NEW).token_ids == greedy("llama", PROMPT, NEW)
        if number in (0, 1, 3):
            assert engine.generate(PROMPT, NEW, SAMPLING).token_ids == sampled()


@pytest.mark.few(1)
@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}, {**dict.fromkeys(PARTS, "cpu"), "lm_head": "cpu"}])
def test_device_map(saved: Path, device_map: str | dict[str, str]) -> None:
    target = TransformersTarget.from_pretrained(saved, dtype=torch.float64, device_map=device_map)
    assert all(parameter.device.type == "cpu" for parameter in target.model.parameters())
    check(target)


@pytest.mark.few(1)
@pytest.mark.parametrize("offloaded", [("model.layers.1",), ("model.layers.0", "model.layers.2", "model.norm")])
def test_layers_on_disk(saved: Path, tmp_path: Path, offloaded: tuple[str, ...]) -> None:
    """Offloaded weights are on the ``meta`` device between uses; the layers' hooks bring them for a call."""
    places = dict.fromkeys((*PARTS, "lm_head"), "cpu") | dict.fromkeys(offloaded, "disk")
    model = accelerate.dispatch_model(
        new_model("llama"), places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    target = TransformersTarget(model)
    assert any(parameter.is_meta for parameter in model.parameters())
    check(target)
    assert any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name for name in FEW if name not in OF_LAYERS])
def test_every_drafter_over_split_layers(drafter: str, tmp_path: Path) -> None:
    places = dict.fromkeys((*PARTS, "lm_head"), "cpu") | {"model.layers.0": "disk", "lm_head": "disk"}
    model = accelerate.dispatch_model(
        new_model("llama"), places, main_device="cpu", offload_dir=str(tmp_path / "weights"), force_hooks=True
    )
    target = TransformersTarget(model)
    check(target, settings_of(drafter, target_of("llama"), tmp_path))


@pytest.mark.slow
def test_everything_on_disk(tmp_path: Path) -> None:
    model = new_model("llama")
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    check(TransformersTarget(model))
