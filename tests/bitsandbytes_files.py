"""bitsandbytes checkpoints of tiny random models, and what their tensors stand for by the format's definition."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import models
from tests.int4_files import SIZES

# Quantiles of a normal distribution, and numbers of one sign bit, two bits of exponent and one of fraction over the
# largest, as the package's `get_4bit_type` has them.
LISTS = {
    "nf4": torch.tensor(
        (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        )
    ),
    "fp4": torch.tensor([0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12.0,
}


def tensors_4bit(
    outputs: int, inputs: int, *, kind: str, size: int, nested: bool, seed: int, storage: torch.dtype = torch.uint8
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A linear's tensors, and the weight [outputs, inputs] float32 that they stand for.

    Args:
        kind: ``nf4`` or ``fp4``.
        size: values of a group, which lie side by side in the whole matrix.
        nested: the groups' scales are quantised, too.
        storage: dtype that the bytes of the codes are viewed as.
    """
    random = torch.Generator().manual_seed(seed)
    count = outputs * inputs
    codes = torch.randint(16, (count,), generator=random)
    groups = -(-count // size)
    told: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [outputs, inputs]}
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    tensors = {"": packed.view(-1).view(storage)[:, None], ".quant_map": LISTS[kind].clone()}
    if nested:
        tensors[".absmax"] = torch.randint(256, (groups,), generator=random).to(torch.uint8)
        tensors[".nested_absmax"] = torch.rand(-(-groups // 256), generator=random) * 0.02 + 0.01
        tensors[".nested_quant_map"] = torch.linspace(-1, 1, 256)
        offset = torch.tensor(0.0625123)
        told |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        own = tensors[".nested_absmax"].repeat_interleave(256)[:groups]
        scales = tensors[".nested_quant_map"][tensors[".absmax"].long()] * own + offset
    else:
        tensors[".absmax"] = scales = torch.rand(groups, generator=random) * 0.08 + 0.02
    text = torch.tensor([*json.dumps(told).encode()], dtype=torch.uint8)
    tensors[f".quant_state.bitsandbytes__{kind}"] = text
    weight = LISTS[kind][codes] * scales.repeat_interleave(size)[:count]
    return tensors, weight.view(outputs, inputs)


def tensors_8bit(outputs: int, inputs: int, *, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same for a linear of LLM.int8: codes times the row's largest magnitude over 127."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (outputs, inputs), generator=random).to(torch.int8)
    largest = torch.rand(outputs, generator=random) * 0.08 + 0.02
    tensors = {"": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes.float() * (largest * torch.tensor(1 / 127))[:, None]


def bitsandbytes_checkpoint(
    folder: Path,
    *,
    kind: str = "nf4",
    size: int = 64,
    nested: bool = True,
    family: str = "llama",
    storage: torch.dtype = torch.uint8,
    settings: Mapping[str, Any] | None = None,
    kept: tuple[str, ...] = ("lm_head",),
    seed: int = 0,
    **sizes: Any,
) -> dict[str, torch.Tensor]:
    """Write one, and return the weights of the dense model that it stands for, in float32.

    Args:
        kind: ``nf4``, ``fp4`` or ``int8``.
        settings: changes to its ``quantization_config``.
        kept: parts of names of linears that are not quantised.
    """
    bits = 8 if kind == "int8" else 4
    own: dict[str, Any] = {"quant_method": "bitsandbytes", f"load_in_{bits}bit": True, "llm_int8_skip_modules": None}
    own |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested} if bits == 4 else {}
    own |= settings or {}
    model = models.new_model(family, torch.float16, **{**SIZES, **sizes})
    tensors, dense = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    tied = bool(model.config.tie_word_embeddings)
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        if tensor.ndim < 2 or "embed" in name or any(part in name for part in kept):
            if not (tied and name == "lm_head.weight"):
                tensors[name] = tensor
            dense[name] = tensor.float()
            continue
        if bits == 8:
            made, dense[name] = tensors_8bit(*tensor.shape, seed=seed + number)
        else:
            made, dense[name] = tensors_4bit(
                *tensor.shape, kind=kind, size=size, nested=nested, seed=seed + number, storage=storage
            )
        place = name.removesuffix("weight")
        tensors |= {f"{place if what[:1].isalpha() else name}{what}": value for what, value in made.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "quantization_config": own}))
    model.generation_config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return dense
