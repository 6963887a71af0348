"""Options of transformers' ``generate``: each is followed by ``custom_generate``, or refused by its name.

``generate`` turns most of its options into logits processors and stopping criteria, which the loop calls. Options that
ask for another loop, for inputs other than token ids, or for something that a speculative loop does not have are
refused. So are options of unknown versions of transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import cache
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from specdec.errors import ConfigError, TargetError, shown
from specdec.runners.replicas import Replicas

__all__ = [
    "ARGUMENTS",
    "FOLLOWED",
    "REFUSED",
    "WITHOUT_EFFECT",
    "check_arguments",
    "check_inputs",
    "check_options",
    "check_preparation",
]

FOLLOWED = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "token_healing"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "remove_invalid_values"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "renormalize_logits"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "watermarking_config", "return_dict_in_generate"),
    "num_return_sequences",
)
"""Followed by processors and criteria, by the loop itself, or by ``generate`` before it."""

WITHOUT_EFFECT = (
    *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile"),
    *("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups", "low_memory"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
    *("speculation_type", "decoder_start_token_id", "continuous_batching_config", "transformers_version"),
)
"""No token depends on them, or only with an option that is refused: beams, transformers' own drafters, encoders."""

_DRAFTER = "it asks for transformers' own drafter; unset it and"
_KEPT = "a speculative loop does not keep them; unset it or use plain generate"
_CONSTRAINED = "constrained search needs beams; unset it or use plain generate"
REFUSED: Mapping[str, tuple[Any, str]] = {
    "num_beams": (1, "specdec decodes each sequence once, without beams; set it to 1"),
    "guidance_scale": (1, "it runs the model once more for every token; unset it or use plain generate"),
    "penalty_alpha": (0, "contrastive search chooses its tokens in another way; unset it or use plain generate"),
    "dola_layers": (None, "DoLa contrasts logits of early layers; unset it or use plain generate"),
    "constraints": (None, _CONSTRAINED),
    "force_words_ids": (None, _CONSTRAINED),
    "prompt_lookup_num_tokens": (None, f"{_DRAFTER} give drafter='prompt_lookup'"),
    "assistant_early_exit": (None, f"{_DRAFTER} give drafter='kangaroo'"),
    "use_mtp": (False, f"{_DRAFTER} name one of specdec's"),
    "is_assistant": (False, "it makes the model transformers' own drafter; unset it"),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), (False, _KEPT)),
    "cache_implementation": (None, "specdec keeps its own cache, as it is, on the device; unset it"),
}
"""Option -> its value that asks for nothing, as None and False do, and what is to be done instead."""

ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("self", "inputs", "generation_config", "kwargs", "custom_generate"), "followed"),
    **dict.fromkeys(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"), "followed"),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask"), "without effect"),  # but for guidance
    **dict.fromkeys(("synced_gpus", "assistant_model", "streamer"), "refused"),
}
"""Arguments of ``generate`` beside those options."""

_CACHES = ("dynamic", "static", "hybrid", "hybrid_chunked", "sliding_window")  # of the same keys and values
# What generate always prepares, and what changes no token; all else would be ignored, and is refused.
_HARMLESS = (
    *("attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache"),
    *("return_dict", "output_router_logits", "interpolate_pos_encoding"),
)


def check_arguments(model: PreTrainedModel, synced_gpus: bool = False) -> None:
    """Raises ConfigError for arguments that ``generate`` keeps from a custom loop; nothing but its frame has them."""
    arguments = _arguments()
    if arguments.get("streamer") is not None:
        raise ConfigError(
            "streamer was given to generate, which does not hand it to a custom loop; give it to the loop: "
            "custom_generate=functools.partial(specdec.custom_generate, streamer=streamer)"
        )
    if arguments.get("assistant_model") is not None:
        raise ConfigError(
            f"assistant_model was given: {_DRAFTER} give drafter={{'name': 'draft_model', 'model': folder}} to the loop"
        )
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = several and torch.distributed.get_world_size() > 1
    synced = synced_gpus or arguments.get("synced_gpus")
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)  # type: ignore[no-untyped-call]
    if synced or (several and sharded):
        raise ConfigError("synced_gpus=True (FSDP, ZeRO-3) needs every rank to step alike; specdec's steps differ")


def check_options(config: Any) -> None:
    """Raises ConfigError for an option of a generation config that would have no effect."""
    for name, (off, reason) in REFUSED.items():
        value = getattr(config, name, None)
        if value is None or value is False or value == off or (name == "cache_implementation" and value in _CACHES):
            continue
        raise ConfigError(f"{name} is {shown(value)}: {reason}")
    for name in sorted(_options() - {*FOLLOWED, *WITHOUT_EFFECT, *REFUSED}):
        if getattr(config, name, None) not in (None, False):
            raise ConfigError(
                f"{name} is {shown(getattr(config, name))}, an option that this release of specdec does not know; "
                "unset it or use plain generate"
            )


def check_inputs(input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    """[B, n] which tokens are no padding.

    Raises:
        ConfigError: inputs of the model other than token ids, padded on the left or not at all.
    """
    for name, value in inputs.items():
        if name not in _HARMLESS and not _says_nothing(name, value):
            given = f"holds {', '.join(map(str, value))}" if isinstance(value, Mapping) else "was given"
            raise ConfigError(f"{name} {given}; specdec feeds the model token ids alone: use plain generate")
    if not input_ids.shape[1]:
        raise ConfigError("input_ids is empty; specdec decodes from token ids: give at least one token")
    cache, mask, positions = (inputs.get(name) for name in ("past_key_values", "attention_mask", "position_ids"))
    if cache is not None and (cache.get_seq_length() > 0 or getattr(cache, "_is_user_defined", False)):
        raise ConfigError(
            f"past_key_values was given, and holds {cache.get_seq_length()} tokens; specdec keeps its own cache, and "
            "would neither read nor fill it: leave it out"
        )
    seen = torch.ones_like(input_ids) if mask is None else (mask != 0).long()
    if seen.shape != input_ids.shape:
        raise ConfigError(
            f"attention_mask is {list(seen.shape)} and input_ids {list(input_ids.shape)}; make them alike"
        )
    if mask is not None and not bool((mask == seen).all()):
        raise ConfigError(f"attention_mask holds {_first_odd(mask)}; it says 1 for a token and 0 for padding")
    if bool((seen.diff(dim=-1) < 0).any()) or not bool(seen[:, -1:].all()):
        raise ConfigError("attention_mask holds zeros behind ones; specdec takes sequences that are padded on the left")
    if positions is not None and not _counts_from_0(positions, seen):
        raise ConfigError(
            f"position_ids are {shown(positions.tolist())}; specdec counts positions from 0: leave them out"
        )
    return seen


def check_preparation(model: PreTrainedModel, input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> None:
    """Raises TargetError where a class of transformers has a loop of its own, or feeds its model more than token ids.

    Some have a ``prepare_inputs_for_generation`` for images, positions or token types; ``generate`` calls it before
    every forward, and specdec never does. (Those of others are refused, see :mod:`specdec.models.around_layers`.)
    """
    kind: Any = type(model)
    for method in ("_sample", "_prefill"):
        if getattr(kind, method) is not getattr(GenerationMixin, method):
            raise TargetError(
                f"{kind.__name__} decodes in a loop of its own ({method}), which specdec does not know; use plain "
                "generate"
            )
    if kind.prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        return
    called: Any = Replicas(model).root  # some keep what they made
    for more, first in ((0, True), (1, False)):  # the prompt, and a text that has gone on
        ids = torch.cat((input_ids, input_ids[:, -1:].expand(-1, more)), 1)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        model_inputs = {**inputs, "past_key_values": None, "attention_mask": None, "position_ids": positions}
        prepared = called.prepare_inputs_for_generation(
            ids, is_first_iteration=first, **{**model_inputs, "use_cache": False}
        )
        _check_made(kind.__name__, prepared, ids)


def _check_made(name: str, prepared: Mapping[str, Any], ids: torch.Tensor) -> None:
    fed, positions = prepared.get("input_ids"), prepared.get("position_ids")
    odd = [
        key for key, value in prepared.items() if key not in (*_HARMLESS, "input_ids") and not _says_nothing(key, value)
    ]
    if fed is None or not torch.equal(fed, ids):
        odd.append("input_ids")
    # Rotary positions are relative, so that all of them may be moved.
    if positions is not None and not _counts_from_0(positions - positions[..., :1], torch.ones_like(ids)):
        odd.append("position_ids")
    if odd:
        raise TargetError(
            f"prepare_inputs_for_generation of {name} makes {', '.join(sorted(odd))} of token ids, which specdec does "
            "not feed to the model; use plain generate"
        )


def _counts_from_0(positions: torch.Tensor, seen: torch.Tensor) -> bool:
    """Whether positions [..., B, n] are those of the tokens that are ``seen``, whatever the others' are."""
    own = (seen.cumsum(-1) - 1).clamp(min=0)
    return positions.shape[-1] == own.shape[-1] and bool(((positions == own) | (seen == 0)).all())


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an input is as if it were left out, as what goes with a text alone is."""
    if isinstance(value, torch.Tensor):  # zeros may be a black image or a silence, and the type of a text
        if name == "cache_position":
            return value.ndim == 1 and _counts_from_0(value[None], torch.ones_like(value)[None])
        return value.numel() == 0 or (name.endswith("token_type_ids") and not bool(value.any()))
    if isinstance(value, Mapping):
        return all(_says_nothing(str(key), held) for key, held in value.items())
    if isinstance(value, list | tuple):
        return all(_says_nothing(name, held) for held in value)
    return value is None or value is (name == "is_causal")  # a flag that is not raised


def _first_odd(mask: torch.Tensor) -> Any:
    return mask[(mask != 0) & (mask != 1)].flatten()[0].item()


@cache
def _options() -> frozenset[str]:
    """The options of this version of transformers."""
    config = GenerationConfig()  # type: ignore[no-untyped-call]
    return frozenset(name for name in vars(config) if not name.startswith("_"))


def _arguments() -> Mapping[str, Any]:
    """What the nearest ``generate`` was called with, if it calls a custom loop."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    frame_locals: Mapping[str, Any] = {} if frame is None else frame.f_locals
    return frame_locals if callable(frame_locals.get("custom_generate")) else {}
