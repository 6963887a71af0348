"""A live model of transformers, from anything that holds one: as transformers loads it, or filled with what it cannot
load here, such as a GGUF file's blocks or a GPTQ checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from specdec.decoder.names import CHOICE, FUSED, Weight
from specdec.errors import ConfigError
from specdec.models.described_checkpoint import DescribedCheckpoint
from specdec.models.gguf import is_gguf
from specdec.models.loading import load_weights
from specdec.models.names import model_source
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
    place = model_source(path, revision=revision, subfolder=subfolder, code=trust_remote_code)
    spread, int8 = device_map is not None or split, activations == "int8"
    if not spread or is_gguf(place):
        found = DescribedCheckpoint.opened(path, in_blocks=False, int8=int8, **options)
        if isinstance(found, DescribedCheckpoint) and found.quantised is not None:
            model = _of_described(found, device_map, split=split)
            why = "it is spread" if spread else found.why_dense
            return (model if device is None else model.to(device)), f"dequantised: {why}"
    return load_weights(path, device_map=device_map, split=split, activations=activations, **options), None


@torch_switches.reads_weights
def _of_described(found: DescribedCheckpoint, device_map: Any, *, split: bool) -> Any:
    """A model with a described checkpoint's weights."""
    config, checkpoint = found.config, found.checkpoint
    vars(config).pop("quantization_config", None)  # a copy of the model, or of its config, has none
    parts = dict[str, list[torch.Tensor]]()
    for weight in checkpoint.shapes:
        if weight.expert is None and checkpoint.has(weight):
            dtype = torch.float32 if weight.kind == CHOICE else found.dtype  # as its class keeps it
            own = checkpoint.as_named(weight)(checkpoint.read(weight)).to(dtype)
            parts.setdefault(checkpoint.names.own(weight), []).append(own)
    weights = {name: own[0] if len(own) == 1 else torch.cat(own) for name, own in parts.items()}
    for layer in range(len(checkpoint.spec.layers)):
        for part, kind in product(FUSED, ("weight", "bias")) if checkpoint.experts_in(layer) else ():
            every = Weight(part, layer, kind=kind)
            if each := [torch.cat([*tensors]).to(found.dtype) for tensors in checkpoint.experts(layer, part, kind)]:
                weights[checkpoint.names.own(every)] = checkpoint.as_named(every)(torch.stack(each))
    model = _made(config, weights, found.dtype, device_map, split=split)
    model.generation_config, model.name_or_path = found.generation_config, found.path
    return model


def _made(config: Any, weights: Mapping[str, torch.Tensor], dtype: Any, device_map: Any, *, split: bool) -> Any:
    """A model of weights by transformers' names, which may be spread over devices or processes."""
    classes: Any = AutoModelForCausalLM
    config._experts_implementation = "eager"  # which takes every dtype
    with init_empty_weights(include_buffers=False):
        model: Any = classes.from_config(config, dtype=dtype)
    added = [name for name in weights.keys() - model.state_dict().keys() if name.endswith(".bias")]
    if device_map is None and not split:
        for name in added:  # a product of any class can have one
            model.get_submodule(name.removesuffix(".bias")).bias = nn.Parameter(weights[name])
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        return model.eval()
    if added:
        raise ConfigError(
            f"{len(added)} biases, such as {min(added)}, have no place in transformers' {type(model).__name__}, which "
            "spreads a model over devices and processes: leave device_map out"
        )
    plan = DistributedConfig(tp_plan="auto") if split else None
    model = classes._model_mapping[type(config)].from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, device_map=device_map, distributed_config=plan
    )
    model.config._name_or_path = ""  # not "None"
    return model
