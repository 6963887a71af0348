"""A live model of transformers, from anything that holds one: as transformers loads it, or filled with what it cannot
load here, such as a GGUF file's blocks or a GPTQ checkpoint's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.decoder.names import CHOICE, FUSED, Weight
from specdec.models.described_checkpoint import DescribedCheckpoint
from specdec.models.loading import load_weights
from specdec.step import torch_switches

__all__ = ["load_live", "load_model"]


def load_model(path: str | Path, **options: Any) -> PreTrainedModel:
    """The model alone that :func:`load_live` loads."""
    return load_live(path, **options)[0]


def load_live(
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
    trust_remote_code: bool = False,
    split: bool = False,
    activations: str = "default",
    revision: str | None = None,
    subfolder: str | None = None,
    max_model_len: int | None = None,
) -> tuple[PreTrainedModel, str | None]:
    """A checkpoint's model, and how its weights are held if the file has them quantised.

    ``split``: over the processes of torch.distributed, each weight by the model's own plan. Errors as of
    :func:`specdec.models.loading.load_weights`.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    options |= {"revision": revision, "subfolder": subfolder, "max_model_len": max_model_len}
    if device_map is None and not split:
        found = DescribedCheckpoint.opened(path, in_blocks=False, int8=activations == "int8", **options)
        if isinstance(found, DescribedCheckpoint) and found.quantised is not None:
            model: Any = _filled(found)
            return model if device is None else model.to(device), f"dequantised: {found.why_dense}"
    return load_weights(path, device_map=device_map, split=split, activations=activations, **options)


@torch_switches.reads_weights
def _filled(found: DescribedCheckpoint) -> PreTrainedModel:
    """A model with a described checkpoint's weights."""
    classes: Any = AutoModelForCausalLM
    config, checkpoint = found.config, found.checkpoint
    vars(config).pop("quantization_config", None)  # a copy of the model, or of its config, has none
    config._experts_implementation = "eager"  # which takes every dtype
    with init_empty_weights(include_buffers=False):
        model: Any = classes.from_config(config, dtype=found.dtype)
    state = dict[str, torch.Tensor]()
    for weight in checkpoint.shapes:
        if weight.expert is None and checkpoint.has(weight):
            kind = torch.float32 if weight.kind == CHOICE else found.dtype  # as its class keeps it
            state[checkpoint.names.own(weight)] = checkpoint.read(weight).to(kind)
    for layer in range(len(checkpoint.spec.layers)):
        for part in FUSED if checkpoint.experts_in(layer) else ():
            each = [torch.cat([*tensors]).to(found.dtype) for tensors in checkpoint.experts(layer, part)]
            state[checkpoint.names.own(Weight(part, layer))] = torch.stack(each)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.generation_config = found.generation_config
    model.name_or_path = found.path
    return model.eval()  # type: ignore[no-any-return]
