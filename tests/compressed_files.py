"""compressed-tensors checkpoints of tiny random models, and what their tensors stand for by the format's definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import models
from tests.int4_files import SIZES, packed

__all__ = ["compressed_checkpoint", "compressed_tensors"]


def compressed_tensors(
    outputs: int, inputs: int, *, scheme: Mapping[str, Any], form: str, seed: int, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear's tensors by the names that they have behind its own, and the weight [outputs, inputs] float32.

    Args:
        scheme: the ``weights`` of a group in a config.
        form: ``pack-quantized`` or ``int-quantized``.
        dtype: of the scales.
    """
    random = torch.Generator().manual_seed(seed)
    bits, size = scheme["num_bits"], scheme.get("group_size") or -1
    most = 1 << bits - 1
    group = size if size > 0 else inputs
    codes = torch.randint(-most, most, (outputs, inputs), generator=random).to(torch.int8)
    shape = (1, 1) if scheme["strategy"] == "tensor" else (outputs, inputs // group)
    scales = ((torch.rand(shape, generator=random) + 0.5) / (8 * most)).to(dtype)
    zeros = torch.randint(-most, most, (outputs, inputs // group), generator=random).to(torch.int8)
    zeros = torch.zeros_like(zeros) if scheme["symmetric"] else zeros // 4
    wide = (codes.int() - zeros.int().repeat_interleave(group, 1)).float()
    weight = wide * scales.float().expand(outputs, inputs // group).repeat_interleave(group, 1)
    tensors = {"weight_scale": scales.reshape(1) if scheme["strategy"] == "tensor" else scales}
    if form == "pack-quantized":
        tensors["weight_packed"] = _words(codes, bits)
        tensors["weight_shape"] = torch.tensor([outputs, inputs])
    else:
        tensors["weight"] = codes
    if not scheme["symmetric"]:
        tensors["weight_zero_point"] = _words(zeros.t(), bits).t().contiguous() if "weight_packed" in tensors else zeros
    return tensors, weight


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, words] int32 of codes, the first in a word's lowest bits."""
    stored = codes.int() + (1 << bits - 1)
    if bits == 4:
        return packed(torch.nn.functional.pad(stored, (0, -stored.shape[1] % 8)))
    return torch.nn.functional.pad(stored, (0, -stored.shape[1] % 4)).to(torch.uint8).contiguous().view(torch.int32)


def compressed_checkpoint(
    folder: Path,
    *,
    bits: int = 4,
    size: int = 64,
    strategy: str = "group",
    symmetric: bool = True,
    form: str = "pack-quantized",
    family: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    settings: Mapping[str, Any] | None = None,
    kept: tuple[str, ...] = ("lm_head", "mlp.gate."),
    seed: int = 0,
    **sizes: Any,
) -> dict[str, torch.Tensor]:
    """Write one, and return the weights of the dense model that it stands for, in float32.

    Args:
        size: inputs of a group, where the strategy is ``group``.
        dtype: of the scales.
        settings: changes to its ``quantization_config``.
        kept: parts of names of linears that are not quantised.
    """
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    scheme |= {"group_size": size if strategy == "group" else None}
    rounds = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    model = models.new_model(family, torch.float16, **{**SIZES, **sizes})
    tensors, dense, ignored = dict[str, torch.Tensor](), dict[str, torch.Tensor](), []
    tied = bool(model.config.tie_word_embeddings)

    def quantised(place: str, shape: tuple[int, ...]) -> torch.Tensor:
        own = {"scheme": scheme, "form": form, "seed": seed + len(tensors), "dtype": dtype}
        made, weight = compressed_tensors(*shape, **own)
        tensors.update({f"{place}.{kind}": value for kind, value in made.items()})
        return weight

    for name, tensor in model.state_dict().items():
        place = name.removesuffix(".weight")
        if tensor.ndim == 3:  # of all experts, which are one by one in such a checkpoint
            before, _, fused = name.rpartition(".")
            parts = fused.split("_")[:-1]
            shape = tensor.shape[1] // len(parts), tensor.shape[2]
            each = [[quantised(f"{before}.{n}.{part}_proj", shape) for part in parts] for n in range(len(tensor))]
            dense[name] = torch.stack([torch.cat(own) for own in each])
        elif tensor.ndim < 2 or "embed" in name or any(part in name for part in kept):
            ignored += [place] if tensor.ndim == 2 and "embed" not in name else []
            if not (tied and name == "lm_head.weight"):
                tensors[name] = tensor
            dense[name] = tensor.float()
        else:
            dense[name] = quantised(place, tensor.shape)
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": rounds if bits == 8 else None}
    own = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ignored}
    own |= {"config_groups": {"group_0": {**group, "output_activations": None}}, "kv_cache_scheme": None}
    own |= settings or {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": own}))
    model.generation_config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return dense
