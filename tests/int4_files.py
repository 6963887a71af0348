"""GPTQ and AWQ checkpoints of tiny random models, and what their tensors stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import models

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each four bits of a word are of


def packed(codes: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """[rows, columns / 8] int32 of codes [rows, columns], eight columns in a word."""
    found = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        found |= codes[:, column::8].long() << 4 * place
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def int4_tensors(
    outputs: int, inputs: int, *, method: str, group_size: int, sym: bool, seed: int, stored: int = 1
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear's tensors, and the weight [outputs, inputs] float32 that they stand for.

    ``stored``: what is taken from a zero where it is written, 1 of GPTQ's first format.
    """
    random = torch.Generator().manual_seed(seed)
    size = inputs if group_size == -1 else group_size
    groups = -(-inputs // size)
    codes = torch.randint(16, (inputs, outputs), generator=random)
    zeros = torch.randint(stored, 16 + stored, (groups, outputs), generator=random)
    near = torch.rand(zeros.shape, generator=random) < 0.9  # else all weights would be of one sign
    zeros = torch.full_like(zeros, 8) if sym else torch.where(near, 7 + zeros % 2, zeros)
    scales = (torch.rand(groups, outputs, generator=random) * 0.04 + 0.01).to(torch.float16)
    order = torch.arange(inputs) // size
    weight = scales.float()[order] * (codes - zeros[order]).float()
    if method == "awq":
        tensors = {"qweight": packed(codes, AWQ_ORDER), "qzeros": packed(zeros, AWQ_ORDER), "scales": scales}
    else:
        words = packed(codes.t()).t().contiguous()
        tensors = {"qweight": words, "qzeros": packed(zeros - stored), "scales": scales, "g_idx": order.to(torch.int32)}
    return tensors, weight.t().contiguous()


def int4_checkpoint(
    folder: Path,
    *,
    method: str = "gptq",
    group_size: int = 32,
    sym: bool = False,
    family: str = "llama",
    settings: Mapping[str, Any] | None = None,
    kept: tuple[str, ...] = ("lm_head",),
    seed: int = 0,
    **sizes: Any,
) -> dict[str, torch.Tensor]:
    """Write one, and return the weights of the dense model that it stands for, in float32.

    Args:
        settings: changes to its ``quantization_config``.
        kept: parts of names of linears that are not quantised.
    """
    own = {"quant_method": method, "bits": 4, "group_size": group_size}
    own |= {"version": "gemm", "zero_point": True} if method == "awq" else {"sym": sym, "desc_act": False}
    own |= settings or {}
    stored = 1 if method == "gptq" and own.get("checkpoint_format", "gptq") == "gptq" else 0
    model = models.new_model(family, torch.float16, **{**SIZES, **sizes})
    tensors, dense = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    tied = bool(model.config.tie_word_embeddings)
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        place = name.removesuffix(".weight")
        if tensor.ndim < 2 or "embed" in name or any(part in name for part in kept):
            if not (tied and name == "lm_head.weight"):
                tensors[name] = tensor
            dense[name] = tensor.float()
            continue
        made, dense[name] = int4_tensors(
            *tensor.shape, method=method, group_size=group_size, sym=sym, seed=seed + number, stored=stored
        )
        tensors |= {f"{place}.{kind}": value for kind, value in made.items()}
    model.config.quantization_config = own
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": own}))
    model.generation_config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return dense
