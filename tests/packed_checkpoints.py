"""What tests of checkpoints in 4 or 8 bits share: loading, changing, and comparing every weight."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec import TransformersTarget
from specdec.models.live_model import load_live
from specdec.runners.block_weight import BlockWeight

__all__ = ["assert_blocks_are", "assert_weights_are", "blocks_of", "edit", "load", "weights_of"]


def load(folder: Path, dtype: str = "auto", *, in_blocks: bool = True, **options: Any) -> Any:
    """Its target, or without blocks transformers' model; and how the weights are held."""
    if not in_blocks:
        return load_live(folder, dtype=dtype, **{"device": None, "device_map": None, **options})
    target = TransformersTarget.from_pretrained(folder, dtype=dtype, **options)
    return target, target.describe()["model"]["weights"]


def weights_of(loaded: Any) -> dict[str, torch.Tensor]:
    """By transformers' names."""
    named = getattr(loaded, "named_weights", None)
    return dict(loaded.state_dict() if named is None else named())


def blocks_of(target: Any) -> dict[str, BlockWeight]:
    """The names of weights in blocks -> what they are multiplied in."""
    every = target.executor.kernels()
    return {name: kernel for names, kernel in every if isinstance(kernel, BlockWeight) for name in names}


def edit(folder: Path, change: Any) -> None:
    """Write a checkpoint's tensors again, changed."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_blocks_are(target: Any, expected: Mapping[str, torch.Tensor], count: int, dtype: torch.dtype) -> None:
    """The target has ``count`` weights in blocks; multiplied, or looked up, they have the expected values."""
    assert len(blocks_of(target)) == count
    for names, kernel in target.executor.kernels():
        if isinstance(kernel, BlockWeight):
            weight = torch.cat([expected[name] for name in names])
            assert torch.equal(kernel(torch.eye(kernel.inputs, dtype=dtype)), weight.t().to(dtype)), names
            assert torch.equal(kernel.look_up(range(5, kernel.outputs)), weight[5:].to(dtype)), names


def assert_weights_are(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """In float32, in blocks and dequantised, the checkpoint has these weights; its config names no quantisation."""
    dense, how = load(folder, "float32", in_blocks=False)
    assert how.startswith("dequantised: another way to run its layers was asked for")
    assert not hasattr(dense.config, "quantization_config")
    for loaded in (load(folder, "float32")[0], dense):
        weights = weights_of(loaded)
        assert {*weights} == {*expected}
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
