"""Live weights: a live model's, for a decoder by its spec, where the model is as its class makes it.

A model with hooks, replaced parts or other tensors computes something else than its config says, so it is refused by
name; and so is one whose rotary frequencies were rounded with its weights, as by ``model.to(torch.bfloat16)``.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec.decoder.families import FAMILIES, spec_of
from specdec.decoder.rope import frequencies
from specdec.decoder.settings import Settings
from specdec.decoder.spec import DecoderSpec, Experts, UnknownDecoder
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.decoder.weights.source import TensorSource
from specdec.models.inspection import why_special

__all__ = ["read_live"]

_MODES = ("training", "gradient_checkpointing", "activation_checkpointing", "name_or_path", "vocab_size")
_HOMES = ("torch.nn.modules.", "transformers.models.", "transformers.activations")


def read_live(model: PreTrainedModel) -> Checkpoint:
    """A model's weights, which are copied when they are read.

    Raises:
        UnknownDecoder: no description covers it, or a part of it is not as its class makes it.
        CheckpointError: it has other tensors than its config says.
    """
    config = model.config
    spec = spec_of(config.model_type, Settings.of(config))
    if type(model).__name__ != spec.architecture:
        raise UnknownDecoder(f"it is a {type(model).__name__}, and described is {spec.architecture}")
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(_HOMES):
            raise UnknownDecoder(f"{name or 'it'} is a {type(module).__name__} of {type(module).__module__}")
        if (special := why_special(module)) is not None:
            raise UnknownDecoder(f"{name or 'it'} ({type(module).__name__}) {special}")
        chosen = getattr(module, "top_k", None)
        if chosen not in (None, *(one.mlp.chosen for one in spec.layers if isinstance(one.mlp, Experts))):
            raise UnknownDecoder(f"{name} ({type(module).__name__}) chooses {chosen} experts, not as its config says")
    _check_numbers(model)
    _check_buffers(model, spec)
    source = TensorSource(model.state_dict(), f"this {type(model).__name__}")
    return Checkpoint(spec, FAMILIES[config.model_type].names, source)


def _check_numbers(model: Any) -> None:
    """Raises UnknownDecoder where parts have other numbers than those that its config would give them."""
    if len(dtypes := {str(weight.dtype)[6:] for weight in model.parameters()}) > 1:
        raise UnknownDecoder(f"its weights are of several dtypes: {', '.join(sorted(dtypes))}")
    kind = model.config._attn_implementation
    attention = ALL_ATTENTION_FUNCTIONS.get(kind)  # eager is of the class
    if kind != "eager" and not getattr(attention, "__module__", "").startswith("transformers."):
        raise UnknownDecoder(f"its attention is {kind!r}, which is none of transformers'")
    with torch.device("meta"):
        own = dict(type(model)(deepcopy(model.config)).named_modules())
    for name, module in model.named_modules():
        if type(module) is not type(own.get(name)):
            raise UnknownDecoder(f"{name} is a {type(module).__name__}, and not as its class makes it")
        for key, value in vars(own[name]).items():
            plain = isinstance(value, bool | int | float | str) and key not in _MODES and not key.startswith("_")
            if plain and (told := vars(module).get(key)) != value:
                raise UnknownDecoder(f"{name or 'it'} has {key} {told}, and by its config {value}")


def _check_buffers(model: Any, spec: DecoderSpec) -> None:
    """Raises UnknownDecoder where a number that modules keep beside their weights is not what the config says."""
    known = [frequencies(rope)[0] for rope in spec.ropes if rope.dim]
    for name, buffer in model.named_buffers():
        if known and name.endswith("inv_freq") and not any(torch.equal(buffer.float().cpu(), one) for one in known):
            raise UnknownDecoder(
                f"{name} is {buffer.dtype}, and not what its config says: the model was cast; load it in its dtype "
                "(from_pretrained(..., dtype=...))"
            )
