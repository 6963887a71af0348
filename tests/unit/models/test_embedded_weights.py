"""The weights in this package: whole, small, with a card each, and found by the model that they were trained for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters.heads.layout import find
from drafters.kangaroo.adapter import Adapter
from drafters.medusa.heads import MedusaHeads
from drafters.shared.weights import embedded_weights, weights_folder
from specdec.errors import CheckpointError
from specdec.models.transformers_target import TransformersTarget

KINDS: dict[str, Any] = {"kangaroo": Adapter, "medusa": MedusaHeads}
FOLDERS = [
    pytest.param(drafter, target, folder, id=folder.name)
    for drafter in ("kangaroo", "medusa", "eagle")
    for target, folder in embedded_weights(drafter).items()
]


@pytest.mark.parametrize(("drafter", "target", "folder"), FOLDERS)
def test_they_are_whole(drafter: str, target: str, folder: Path) -> None:
    found: Any = find(folder) if drafter == "eagle" else KINDS[drafter].from_pretrained(folder)
    layers = 16 if folder.name.startswith("tiny") else 30
    assert target.startswith(f"LlamaForCausalLM-{layers}x{found.config.hidden_size}-v{found.config.vocab_size}-")
    assert f"specdec train {drafter}" in (folder / "README.md").read_text()
    [weights] = folder.glob("*.safetensors")
    assert weights.stat().st_size < 12 * 10**6
    tensors = load_file(weights)
    numbers = tensors.pop("draft_tokens", None)
    kinds = {tensor.dtype for tensor in tensors.values()}
    assert len(kinds) == 1
    if numbers is not None:
        assert numbers.dtype is torch.int64
        assert kinds == {torch.bfloat16}


def test_another_model_is_told_whose_there_are(target_of: Callable[..., TransformersTarget]) -> None:
    with pytest.raises(CheckpointError) as caught:
        weights_folder(None, target_of("llama"), "medusa.heads")
    assert all(own in str(caught.value) for own in embedded_weights("medusa"))
