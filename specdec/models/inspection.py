"""Inspection: the parts of a loaded model, values of its config, and whether specdec can drive it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.decoder.families import FAMILIES, is_described
from specdec.decoder.rope_settings import rope_depends_on_length, rope_kinds
from specdec.errors import TargetError
from specdec.settings.validation import fitting

__all__ = [
    "context_length_of",
    "decoder_parts",
    "device_of",
    "end_ids",
    "eos_ids_of",
    "last_norm",
    "refuse_unfit",
    "unused_generation_options",
    "weight_of",
    "weights_in",
    "why_special",
]

_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT = ("ssm_cfg", "state_size", "mamba_d_state", "conv_kernel", "lru_width")  # options of such layers alone
_CHOOSING = ("index_topk", "index_topk_blocks", "keep_window_size")  # of attention over so many keys, chosen by scores
_DESCRIBED = (
    "its description can be run: load its folder without execution='modules', device_map and parallel='tensor', or "
    "copy the model by Engine.from_model(model)"
)
_UNFIT = "recurrent layers keep no keys per token. Use a decoder of attention and MLP"
_TOKENS = Annotated[int | list[int] | tuple[int, ...] | set[int], "a token id, or a list of them"]
# Options of a generation config that change tokens -> the value that is off, as None is. SamplingParams say these too,
_SAMPLING = {"do_sample": False, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
_PENALTY = {"repetition_penalty": 1}
# and only generate does these.
_GENERATION = {
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("remove_invalid_values", "top_h", "penalty_alpha", "dola_layers"), False),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), False),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), -1),
    **dict.fromkeys(("stop_strings", "watermarking_config"), False),
}
_NORMS = ("norm", "final_layer_norm", "final_layernorm")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Where transformers' hooks come from that look at what a module gives, once a user has asked for hidden states.
_LOOKS = ("transformers.utils.output_capturing", "specdec.runners.whole_model")


def refuse_unfit(name: str, config: Any, *, described: bool = False) -> None:
    """Raises TargetError for models whose state is not a list of keys and values per token, all or the last seen.

    ``described``: a description may run it, where there is one.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    odd = sorted(kinds - _LAYER_TYPES)
    recurrent = [] if kinds else [key for key in _RECURRENT if hasattr(config, key)]
    if (odd or recurrent) and not ((known := is_described(config)) and described):
        copied = known and FAMILIES[config.model_type].architecture.startswith(f"{name.removesuffix('ForCausalLM')}For")
        raise TargetError(
            f"{name} has layers that specdec cannot roll back ({', '.join(odd or recurrent)}); "
            + (_DESCRIBED if copied else _UNFIT)
        )
    longest = context_length_of(config)
    chosen = [f"{key}={limit}" for key in _CHOOSING if 0 < (limit := getattr(config, key, None) or 0) < longest]
    if chosen:
        raise TargetError(
            f"{name} attends to the keys that score best ({', '.join(chosen)}), which specdec does not compute"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise TargetError(f"{name} is an encoder-decoder; specdec drives decoder-only models")


def decoder_parts(name: str, model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
    """The decoder, its layers and its last norm."""
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if decoder is None or decoder is model:
        decoder = model.base_model
    layers = getattr(decoder, "layers", None)
    norm = next((getattr(decoder, name) for name in _NORMS if hasattr(decoder, name)), None)
    if not isinstance(layers, nn.ModuleList) or norm is None:
        raise TargetError(
            f"{name} is no decoder that specdec knows: {type(decoder).__name__} has no `layers` and last `norm`"
        )
    if not len(layers):
        raise TargetError(f"{name} has no layers; there is nothing to run")
    return decoder, layers, norm


def last_norm(name: str, model: PreTrainedModel) -> nn.Module:
    """The last norm of a decoder that has one."""
    return decoder_parts(name, model)[2]


def context_length_of(config: Any) -> int:
    """Longest text in tokens. Where rotary frequencies depend on the length, the length up to which they do not."""
    longest = int(getattr(config, "max_position_embeddings", 1 << 20))
    changing = [rope for rope in rope_kinds(config) if rope_depends_on_length(rope)]
    return min([longest, *(int(rope.get("original_max_position_embeddings") or longest) for rope in changing)])


def eos_ids_of(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a model's text."""
    return end_ids(model.generation_config, model.config.get_text_config(), type(model).__name__)


def end_ids(generation_config: Any, config: Any, name: str) -> frozenset[int]:
    """The tokens that end a text, by the generation config or, if it has none, the config; ``name``: whose."""
    ids = getattr(generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(config, "eos_token_id", None)  # several families' have none
    known: Any = () if ids is None else fitting(f"eos_token_id of {name}", ids, _TOKENS)
    return frozenset([known] if isinstance(known, int) else known)


def unused_generation_options(config: Any, *, sampling: bool) -> list[str]:
    """Options of a generation config that would change tokens, other than end tokens; an engine ignores them.

    ``sampling``: whether the caller gave sampling parameters, which replace the config's.
    """
    asked = _GENERATION if sampling else {**_PENALTY, **_GENERATION}
    if config.do_sample and not sampling:  # else these say nothing
        asked = {**_SAMPLING, **asked}
    values = {name: (getattr(config, name, None), off) for name, off in asked.items()}
    return [f"{name}={value!r}" for name, (value, off) in values.items() if value not in (None, off, [])]


def weight_of(module: nn.Module) -> torch.Tensor:
    """The first weight of a module, or what quantisers have in its place.

    Raises:
        TargetError: it has none.
    """
    weight = next(chain(module.parameters(), module.buffers()), None)
    if weight is None:
        raise TargetError(
            f"{type(module).__name__} stands in the place of an embedding or a head, and has no weights, so specdec "
            "cannot see on which device it computes"
        )
    return weight


def weights_in(root: nn.Module) -> int:
    """How many numbers a module's weights are; one that is shared counts once."""
    return sum(weight.numel() for weight in root.parameters())


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: beside its weights, or where accelerate brings weights that it has offloaded."""
    device = weight_of(module).device
    hook: Any = getattr(module, "_hf_hook", None)
    place = getattr(hook, "execution_device", None)
    return device if device.type != "meta" or place is None else torch.device(place)


def why_special(module: nn.Module) -> str | None:
    """How a module differs from its class, or None: hooks, a replaced ``forward``, or weights that are not plain.

    DTensors, quantised weights and other tensor subclasses are not plain parameters.
    """
    for name, parameter in module._parameters.items():
        if parameter is None or (type(parameter) is nn.Parameter and type(parameter.data) is torch.Tensor):
            continue
        # Checked first: libraries that split weights over devices replace their modules' forward as well.
        return f"has a {name} that is a {type(parameter.data).__name__}"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    if hasattr(module, "_hf_hook") or any(_hooks_in(getattr(module, name, {})) for name in _HOOKS):
        return "has hooks"
    if "parametrizations" in module._modules:
        return "is parametrized"
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter.is_meta:
            return f"has its {name} offloaded"
        if not parameter.is_floating_point():
            return f"has a {name} of {parameter.dtype}"
    return None


def _hooks_in(table: Mapping[int, Any]) -> list[Any]:
    """The hooks in a module's table, without those that change nothing and look only while the model itself is called:
    transformers leaves them in a model that was asked for hidden states or attentions, and ``modules`` asks the norm.
    """
    return [hook for hook in table.values() if getattr(hook, "__module__", None) not in _LOOKS]
