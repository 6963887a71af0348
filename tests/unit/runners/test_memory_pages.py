"""Pages of repacked weights go back to the file that they came from, and no others."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine, TransformersTarget
from specdec.execute.weights import DecoderWeights
from specdec.native.library import library
from specdec.runners.memory_pages import FilePages, HugePages, trim_heap
from tests import models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")


def test_a_file_s_pages_are_read_anew(tmp_path: Path) -> None:
    """What was changed in memory is gone afterwards, but for the first and last page, which others may share."""
    numbers = torch.arange(5 * mmap.PAGESIZE // 4, dtype=torch.float32)
    save_file({name: numbers.clone() for name in ("before", "weight", "after")}, tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    for tensor in loaded.values():
        tensor.neg_()
    FilePages().release([loaded["weight"], torch.ones(5 * mmap.PAGESIZE)])
    page = mmap.PAGESIZE // 4
    assert torch.equal(loaded["weight"][page:-page], numbers[page:-page])
    assert torch.equal(loaded["before"], -numbers)
    assert torch.equal(loaded["after"], -numbers)


def test_memory_that_is_no_file_s_stays() -> None:
    numbers = torch.arange(100_000.0)
    FilePages().release([numbers, numbers[::2], numbers[:0]])
    assert torch.equal(numbers, torch.arange(100_000.0))


def test_free_heap_pages_go_back() -> None:
    """Small blocks that one above them keeps from the heap's end would stay with the process."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    blocks = [torch.ones(4096) for _ in range(3000)]  # 16 KiB each, below what malloc maps
    last = torch.ones(4096)
    trim_heap()
    before = resident("")  # of all mappings: which heap a thread's blocks are from depends on who else allocates
    del blocks
    trim_heap()
    assert resident("") < before - (30 << 20)
    assert torch.equal(last, torch.ones(4096))


@pytest.mark.slow
def test_what_is_taken_of_huge_pages_lies_apart_and_goes_back() -> None:
    """One after the other, at the beginning of cache lines; more than a chunk at once, too."""
    pages, size = HugePages(), 40 << 20
    taken = [pages.take(count) for count in (0, 1, 100, 5000, size, 3)]
    assert [one.numel() for one in taken] == [0, 1, 100, 5000, size, 3]
    for number, one in enumerate(taken, 1):
        one.fill_(number)
    assert all(bool((one == number).all()) for number, one in enumerate(taken, 1))
    assert all(one.data_ptr() % 64 == 0 for one in taken[1:])
    before = resident("")
    del taken, one
    gc.collect()
    assert resident("") <= before - size // 2, "what else the process holds changes by less"


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no C compiler works here")
def test_a_loaded_checkpoint_is_not_in_memory_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer its weights are packed, and the file leaves memory again."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "vocab_size": 512}
    models.new_model("llama", torch.float32, num_hidden_layers=6, **sizes).save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    shares: list[float] = []
    layer = DecoderWeights._layer

    def watched(self: DecoderWeights, number: int) -> object:
        made = layer(self, number)
        shares.append(resident(str(tmp_path / "model.safetensors")) / size)
        return made

    monkeypatch.setattr(DecoderWeights, "_layer", watched)
    target = TransformersTarget.from_pretrained(tmp_path)
    assert len(shares) == target.num_layers
    assert max(shares) < 0.25  # of which the embedding is a part
    assert resident(str(tmp_path / "model.safetensors")) < 0.15 * size


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


@pytest.mark.few(1)
@pytest.mark.parametrize("execution", ["auto", "fused"])
def test_a_loaded_target_still_has_its_weights(execution: str, tmp_path: Path) -> None:
    """Wide enough for whole pages to go."""
    model = models.new_model("llama", torch.float32, hidden_size=64, intermediate_size=96, head_dim=16)
    model.save_pretrained(tmp_path)
    target = TransformersTarget.from_pretrained(tmp_path, execution=execution)
    prompt = models.prompt_of(9)
    assert Engine(target).generate(prompt, 30).token_ids == models.reference(model, prompt, 30)
    expected = model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in target.named_weights())
