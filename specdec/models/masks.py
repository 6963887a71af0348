"""Masks: the sliding window of each layer, read from the mask functions of the model's own forward.

Some models pass a sliding window to the attention function, others only build it into their mask. A mask of a few
tokens does not show a window, and a mask longer than the window may take gigabytes. But transformers describes a mask
by a function of two positions before it builds the tensor, and this module evaluates that function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_masks_for_generate

from specdec.errors import TargetError
from specdec.runners.whole_model import Sees

__all__ = ["MASKS", "layer_masks", "named_limits", "register_masks", "whole_masks", "window_of"]

MASKS = "specdec_masks"
"""The attention function with which a model's own forward computes nothing, and describes its masks."""

_LIMITS = ("window", "chunk")
_OF_MASKS = ("sliding_window", "attention_chunk_size", "max_window_layers")  # limits that transformers' masks heed


def register_masks() -> None:
    """Make ``MASKS`` known to transformers."""
    AttentionInterface.register(MASKS, _nothing)
    AttentionMaskInterface.register(MASKS, _described)


def layer_masks(layers: Iterable[nn.Module], forward: Callable[[], Any]) -> list[Sees | None]:
    """The mask function of each layer while the model's own ``forward`` runs with ``MASKS``.

    None where a model makes its masks without transformers' helpers, or needs none.
    """
    modules = list(layers)
    visible: list[Sees | None] = [None] * len(modules)

    def note(number: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, arguments: Any, options: Any) -> None:
            given = (getattr(value, "sees", None) for value in (*arguments, *options.values()))
            visible[number] = next((sees for sees in given if sees is not None), None)

        return hook

    hooks = [layer.register_forward_pre_hook(note(number), with_kwargs=True) for number, layer in enumerate(modules)]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return visible


def whole_masks(model: Any) -> Mapping[str, Sees] | Sees | None:
    """The mask functions that a model's own forward takes masks of, by layer type where it has several.

    Raises:
        TargetError: it makes its masks itself, and its config names limits of its attention.
    """
    config = copy.deepcopy(model.config.get_text_config())
    config._attn_implementation = MASKS
    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    rows = torch.zeros(1, 2, int(config.hidden_size), device=model.device)
    made = make(config=config, inputs_embeds=rows, attention_mask=None, past_key_values=None, position_ids=None)
    masks = made if isinstance(made, Mapping) else {"": made}
    found: dict[str, Sees] = {kind: mask.sees for kind, mask in masks.items() if hasattr(mask, "sees")}
    limits = named_limits(config)
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


def window_of(sees: Sees, longest: int) -> int | None:
    """The sliding window of a mask, for texts of up to ``longest`` tokens; None where every earlier key is seen.

    Raises:
        TargetError: the mask is neither causal nor a sliding window, but chunked, for example.
    """
    last, first, seen = longest - 1, 0, longest - 1
    while first < seen:  # the first key that the last token sees
        middle = (first + seen) // 2
        if bool(_look(sees, [last], [middle])):
            seen = middle
        else:
            first = middle + 1
    window = last - seen + 1
    near = {0, 1, 2, window - 1, window, window + 1}
    places = {*range(64), last // 2, last, *near, *(2 * place for place in near), *(last - place for place in near)}
    grid = sorted(place for place in places if 0 <= place <= last)
    queries, keys = torch.tensor(grid)[:, None], torch.tensor(grid)
    wrong = _look(sees, grid, grid) != (keys <= queries) & (keys > queries - window)
    if bool(wrong.any()):
        raise TargetError(
            f"token {grid[int(wrong.any(1).nonzero()[0])]} sees other tokens than all before it, or the last {window}: "
            "a mask in chunks or blocks, which specdec does not compute"
        )
    return window if seen else None


def named_limits(config: Any) -> list[str]:
    """Options of a config that limit attention, other than by the masks that transformers makes."""
    values = config.to_dict().items()
    return sorted(f"{name}={value}" for name, value in values if value and any(part in name for part in _LIMITS))


def _look(sees: Sees, queries: list[int], keys: list[int]) -> torch.Tensor:
    """[Q, K] bool."""
    none = torch.zeros((), dtype=torch.long)
    seen = sees(none, none, torch.tensor(queries)[:, None], torch.tensor(keys))
    return seen.expand(len(queries), len(keys))


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
