"""Pages of repacked weights go back to the file that they came from, and no others."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine, TransformersTarget
from specdec.lowering.pages import forget
from tests import models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")


def test_a_file_s_pages_are_read_anew(tmp_path: Path) -> None:
    """What was changed in memory is gone afterwards, but for the first and last page, which others may share."""
    numbers = torch.arange(5 * mmap.PAGESIZE // 4, dtype=torch.float32)
    save_file({name: numbers.clone() for name in ("before", "weight", "after")}, tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    for tensor in loaded.values():
        tensor.neg_()
    forget(loaded["weight"])
    page = mmap.PAGESIZE // 4
    assert torch.equal(loaded["weight"][page:-page], numbers[page:-page])
    assert torch.equal(loaded["before"], -numbers)
    assert torch.equal(loaded["after"], -numbers)


def test_memory_that_is_no_file_s_stays() -> None:
    numbers = torch.arange(100_000.0)
    forget(numbers)
    forget(numbers[::2])
    forget(numbers[:0])
    assert torch.equal(numbers, torch.arange(100_000.0))


@pytest.mark.parametrize("kernels", ["linear", "transposed", "packed"])
def test_a_loaded_target_still_has_its_weights(kernels: str, tmp_path: Path) -> None:
    """Wide enough for whole pages to go."""
    model = models.new_model("llama", torch.float32, hidden_size=64, intermediate_size=96, head_dim=16)
    model.save_pretrained(tmp_path)
    target = TransformersTarget.from_pretrained(tmp_path, kernels=kernels)
    prompt = models.prompt_of(9)
    assert Engine(target).generate(prompt, 30).token_ids == models.reference(model, prompt, 30)
    expected = model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in target.named_weights())
