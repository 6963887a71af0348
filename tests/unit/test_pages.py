"""Pages of repacked weights go back to the file that they came from, and no others."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specdec import Engine, TransformersTarget
from specdec.lowering import LoweredLayer
from specdec.lowering.pages import forget, trim
from specdec.selfcheck import agrees
from tests import models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")


def test_a_file_s_pages_are_read_anew(tmp_path: Path) -> None:
    """What was changed in memory is gone afterwards, but for the first and last page, which others may share."""
    numbers = torch.arange(5 * mmap.PAGESIZE // 4, dtype=torch.float32)
    save_file({name: numbers.clone() for name in ("before", "weight", "after")}, tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    for tensor in loaded.values():
        tensor.neg_()
    forget(loaded["weight"], torch.ones(5 * mmap.PAGESIZE))
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


def test_free_heap_pages_go_back() -> None:
    """Small blocks that one above them keeps from the heap's end would stay with the process."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    blocks = [torch.ones(4096) for _ in range(3000)]  # 16 KiB each, below what malloc maps
    last = torch.ones(4096)
    trim()
    before = resident("[heap]")
    del blocks
    trim()
    assert resident("[heap]") < before - (30 << 20)
    assert torch.equal(last, torch.ones(4096))


@pytest.mark.parametrize("kernels", ["transposed", "packed"])
def test_a_loaded_checkpoint_is_not_in_memory_twice(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check reads the whole file; then it leaves, and comes back a layer at a time while they are repacked."""
    model = models.new_model(
        "llama", torch.float32, hidden_size=256, intermediate_size=1024, head_dim=64, vocab_size=512
    )
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    shares: list[float] = []

    def watched(target: TransformersTarget, number: int, layer: nn.Module, lowered: LoweredLayer) -> bool:
        shares.append(resident("model.safetensors") / size)
        return agrees(target, number, layer, lowered)

    monkeypatch.setattr("specdec.target.agrees", watched)
    whole = TransformersTarget.from_pretrained(tmp_path, optimize="off")
    assert resident("model.safetensors") > 0.9 * size
    del whole
    target = TransformersTarget.from_pretrained(tmp_path, kernels=kernels)
    shares.append(resident("model.safetensors") / size)
    assert len(shares) == target.num_layers + 1
    assert max(shares) < 0.3


def resident(name: str) -> int:
    """Bytes in memory of the mappings whose name ends so."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = line.endswith(name)
        elif inside and first == "Rss:":
            found += int(rest[0]) * 1024
    return found


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
