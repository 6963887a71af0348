"""Quantised checkpoints in safetensors, whose weights native layers hold in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.errors import CheckpointError, ConfigError
from specdec.models.bitsandbytes_checkpoint import BitsAndBytesFilling
from specdec.models.gguf_blocks import described_rows, why_not_native
from specdec.models.int4_checkpoint import Int4Filling
from specdec.models.int4_settings import Int4Settings
from specdec.models.packed_filling import PackedFilling, opened_tensors
from specdec.runners.block_weight import BlockWeight
from specdec.runners.linear import PackedLinear

__all__ = ["quantised_model"]

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")  # whose layers native layers run
_PACKAGES = {"gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",), "bitsandbytes": ("bitsandbytes",)}
"""Method -> the packages with which transformers loads its checkpoints."""
_MARKS = {"gptq": (".qweight",), "awq": (".qweight",), "bitsandbytes": (".quant_state.", ".SCB")}
"""Method -> what is in the name of a tensor of each quantised weight."""


def quantised_model(
    place: Path,
    config: Any,
    dtype: str | torch.dtype,
    device: Any,
    *,
    in_blocks: bool,
    spread: bool,
    int8: bool,
) -> tuple[PreTrainedModel, str] | None:
    """The model of a GPTQ, AWQ or bitsandbytes checkpoint, and how its weights are held; None where transformers is to
    load it.

    Args:
        place: its folder.
        config: of the checkpoint.
        dtype: ``auto``: bfloat16, unless the config says float32.
        in_blocks: they may be held in blocks, where native layers run them; otherwise they are dequantised.
        spread: over devices or processes.
        int8: rows that blocks are multiplied with are rounded to bytes.

    Raises:
        CheckpointError: weights that have no place in blocks, and packages with which transformers would load them are
            not installed; or tensors are missing, left over, or not as the config says.
        ConfigError: no blocks, or none of integers, whose rows could be rounded.
    """
    told = getattr(config, "quantization_config", None)
    if (method := _method(told)) is None:
        return None
    quantised = True  # as far as is known
    try:
        settings = Int4Settings.of(told, repr(str(place)))
        if (unlike := _why_not_packed(config, spread)) is not None and not _transformers_loads(method):
            raise _unlike(place, method, unlike)
        if dtype == "auto":
            dtype = torch.float32 if config.dtype in ("float32", torch.float32) else torch.bfloat16
        computed: Any = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        why = why_not_native(computed, device) if in_blocks else "another way to run its layers was asked for"
        if why is not None and int8:
            raise ConfigError(f"activations='int8' needs quantised blocks as they lie, and {why}; leave it out")
        files = opened_tensors(place)
        if not (quantised := any(mark in name for name in files for mark in _MARKS[method])):
            raise _dense(place, method)
        if unlike is not None or (why is not None and _transformers_loads(method)):
            return None
        filling: PackedFilling
        if settings is None:
            filling = BitsAndBytesFilling(place, files, config, computed, why is None, int8)
        else:
            filling = Int4Filling(settings, place, files, config, computed, why is None, int8)
    except CheckpointError:
        if quantised and _transformers_loads(method):
            return None
        raise  # transformers would take weights for quantised that are not
    if device is not None:
        model: Any = filling.model
        model.to(device)  # in place
    return filling.model, _described(filling) if why is None else f"dequantised: {why}"


def _method(told: Any) -> str | None:
    """The method that a config's ``quantization_config`` names, or None where it is none of these."""
    if not isinstance(told, Mapping):
        return None
    method = told.get("quant_method")
    if method is None and (told.get("load_in_4bit") or told.get("load_in_8bit")):  # as transformers takes it
        return "bitsandbytes"
    return method if isinstance(method, str) and method in _PACKAGES else None


def _unlike(place: Path, method: str, why: str) -> CheckpointError:
    packages = f"package{'s' if len(_PACKAGES[method]) > 1 else ''} {' and '.join(_PACKAGES[method])}"
    return CheckpointError(
        f"{str(place)!r} is quantised by {method}, and {why}: install the {packages}, with which transformers loads "
        "it, or give a checkpoint that is not quantised"
    )


def _dense(place: Path, method: str) -> CheckpointError:
    return CheckpointError(
        f"the config of {str(place)!r} says quant_method {method!r}, and none of its tensors is a "
        f"{' or '.join(mark.strip('.') for mark in _MARKS[method])}; remove quantization_config from its config.json "
        "if its weights are not quantised, or download the checkpoint anew"
    )


def _transformers_loads(method: str) -> bool:
    """Whether packages are here with which transformers runs such a checkpoint."""
    return all(find_spec(name) is not None for name in _PACKAGES[method])


def _why_not_packed(config: Any, spread: bool) -> str | None:
    """Why a checkpoint is not read here, or None where it is."""
    if config.model_type not in _FAMILIES:
        return f"its architecture {config.model_type!r} is none of {', '.join(_FAMILIES)}"
    return "device_map and ranks spread weights that are not quantised" if spread else None


def _described(filling: PackedFilling) -> str:
    """How a model's quantised weights are held."""
    packed = [module for module in filling.model.modules() if isinstance(module, PackedLinear)]
    stores = {id(module.store): module.store for module in packed if isinstance(module.store, BlockWeight)}
    size = sum(store.nbytes for store in stores.values()) / 1e6
    told = f"{filling.described()} in blocks: {len(packed)} matrices, {size:.0f} MB in panels"
    return told + described_rows(filling.model)
