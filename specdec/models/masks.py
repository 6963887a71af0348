"""Masks: what a live model's own masks let each token see.

Transformers describes a mask by a function of two positions before it builds the tensor; this module has that function.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_masks_for_generate

from specdec.errors import TargetError
from specdec.runners.whole_model import Sees

__all__ = ["register_masks", "whole_masks"]

_MASKS = "specdec_masks"  # the attention function with which masks are described, and nothing is computed

_LIMITS = ("window", "chunk")
_RECURRENT = "mamba_"  # of layers without attention, and models that have some are refused
_OF_MASKS = ("sliding_window", "attention_chunk_size", "max_window_layers")  # limits that transformers' masks heed


def register_masks() -> None:
    """Make what describes masks known to transformers."""
    AttentionInterface.register(_MASKS, _nothing)
    AttentionMaskInterface.register(_MASKS, _described)


def whole_masks(model: Any) -> Mapping[str, Sees] | Sees | None:
    """The mask functions that a model's own forward takes masks of, by layer type where it has several.

    Raises:
        TargetError: it makes its masks itself, and its config names limits of its attention.
    """
    config = copy.deepcopy(model.config.get_text_config())
    config._attn_implementation = _MASKS
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    rows = torch.zeros(1, 2, int(config.hidden_size), device=model.device)
    made = make(config=config, inputs_embeds=rows, attention_mask=None, past_key_values=None, position_ids=None)
    masks = made if isinstance(made, Mapping) else {"": made}
    there = {*(getattr(config, "layer_types", None) or masks)}  # a class may make masks of layers that it has not here
    masks = {kind: mask for kind, mask in masks.items() if kind in there} or masks
    found: dict[str, Sees] = {kind: mask.sees for kind, mask in masks.items() if hasattr(mask, "sees")}
    limits = _named_limits(config)
    if len(found) == len(masks):
        limits = [limit for limit in limits if not any(known in limit for known in _OF_MASKS)]
    if limits:
        raise TargetError(
            f"{type(model).__name__} makes its masks itself, and its config says {', '.join(limits)}: specdec "
            "cannot see how far its attention reaches, so it is refused rather than decoded wrongly"
        )
    if len(found) < len(masks):
        return None
    return found if len(found) > 1 else next(iter(found.values()))


def _named_limits(config: Any) -> list[str]:
    """Options of a config that limit attention, other than by the masks that transformers makes."""
    values = [(name, value) for name, value in config.to_dict().items() if value and not name.startswith(_RECURRENT)]
    return sorted(f"{name}={value}" for name, value in values if any(part in name for part in _LIMITS))


def _nothing(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """An attention function that adds nothing."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _described(
    batch_size: int, q_length: int, kv_length: int, mask_function: Sees, device: Any = None, **_: Any
) -> torch.Tensor:
    """A mask that lets everything pass, and knows the function that it would have been made of."""
    mask: Any = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    mask.sees = mask_function
    described: torch.Tensor = mask
    return described
