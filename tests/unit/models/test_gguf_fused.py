"""GGUF files with queries, keys and values of a layer in one tensor; docs/gguf.md has their distance to llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from specdec import TransformersTarget
from specdec.errors import CheckpointError
from specdec.native.library import library
from specdec.runners.block_weight import BlockWeight
from tests.gguf_families import DIM, HEADS, WIDTH, fused_of, write_family
from tests.packed_checkpoints import weights_of


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_blocks_stay_what_they_are(family: str, tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", family, tensors=fused_of(family), types={"attn_qkv.weight": "Q8_0"})
    target = TransformersTarget.from_pretrained(file, dtype="float32")
    held = weights_of(target)
    for one in gguf.GGUFReader(file).tensors:
        if one.name.endswith("attn_qkv.weight"):
            place = f"model.layers.{one.name.split('.')[1]}.self_attn."
            names = (f"{place}{part}_proj.weight" for part in (("qkv",) if family == "phi3" else "qkv"))
            whole = torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type))
            assert torch.equal(torch.cat([held[name] for name in names]), whole)
    assert any(isinstance(kernel, BlockWeight) for _, kernel in target.executor.kernels())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.attn_qkv.weight": (HEADS * DIM, WIDTH)}, r"has blk\.0\.attn_qkv\.weight of 64 rows, not 128 as its"),
        ({"blk.1.attn_k.weight": (WIDTH, WIDTH)}, r"has blk\.1\.attn_qkv\.weight and blk\.1\.attn_k\.weight, which is"),
        (
            {"blk.1.attn_q.bias": (HEADS * DIM,)},
            r"has blk\.1\.attn_qkv\.weight, to which llama.cpp adds biases where all",
        ),
    ],
)
def test_parts_that_do_not_fit(tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    file = write_family(tmp_path / "a.gguf", "llama", tensors={**fused_of("llama"), **tensors})
    with pytest.raises(CheckpointError, match=message):
        TransformersTarget.from_pretrained(file)
