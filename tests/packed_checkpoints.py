"""What tests of checkpoints in 4 or 8 bits share: loading, changing, and comparing every weight."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specdec.models.loading import load_weights
from specdec.runners.linear import PackedLinear

__all__ = ["assert_blocks_are", "assert_weights_are", "edit", "load"]


def load(folder: Path, dtype: str = "auto", *, in_blocks: bool = True, **options: Any) -> Any:
    settings = {"device": None, "device_map": None, "trust_remote_code": False, **options}
    return load_weights(folder, dtype=dtype, in_blocks=in_blocks, **settings)


def edit(folder: Path, change: Any) -> None:
    """Write a checkpoint's tensors again, changed."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def assert_blocks_are(model: Any, expected: Mapping[str, torch.Tensor], count: int, dtype: torch.dtype) -> None:
    """The model has ``count`` linears in blocks; multiplied, or looked up, they have the expected weights."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    assert len(packed) == count
    for name, module in packed.items():
        weight = expected[f"{name}.weight"]
        assert torch.equal(module(torch.eye(module.in_features, dtype=dtype)), weight.t().to(dtype)), name
        parts = (module.rows.start, module.rows.start + 5, module.rows.stop)  # some rows are not the first ones
        found = torch.cat([row for some in pairwise(parts) for row in module.store.dequantised(*some)])
        assert torch.equal(found, weight), name


def assert_weights_are(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """In float32, in blocks and dequantised, the checkpoint has these weights; its config names no quantisation."""
    dense, how = load(folder, "float32", in_blocks=False)
    assert how == "dequantised: another way to run its layers was asked for"
    for model in (load(folder, "float32")[0], dense):
        weights = model.state_dict()
        assert {*weights} == {*expected}
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
        assert not hasattr(model.config, "quantization_config")
