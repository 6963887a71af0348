"""``model.generate(..., custom_generate=functools.partial(specdec.custom_generate, drafter="lookahead"))``.

Transformers prepares inputs, logits processors and stopping criteria as for its own loop and calls this instead of it.
It hands neither streamer nor stop strings to a custom loop: give those with ``functools.partial``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import numpy as np
import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.arguments import checked
from specdec.batch import Request, Scheduler
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import ConfigError, shown
from specdec.grammar import Grammar
from specdec.model import TransformersTarget
from specdec.processors import takes_rows
from specdec.sampling import SamplingParams

__all__ = ["custom_generate"]


@checked
def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    drafter: str | Mapping[str, Any] | Drafter = "prompt_lookup",
    seed: int | None = None,
    acceptance: str = "auto",
    stop: str | Sequence[str] = (),
    tokenizer: Any = None,
    target: TransformersTarget | None = None,
    policy: str = "acceptance",
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode with a drafter, inside transformers' ``generate``; several sequences at once, padded on the left.

    Args:
        drafter: name, ``{"name": ..., **options}`` or drafter.
        seed: of the sampling noise, plus the sequence's place among several; None draws them from torch's generator, so
            that ``torch.manual_seed`` governs them.
        acceptance: as ``SamplingParams``'; with ``match`` a seed's text is the same under every drafter.
        stop: stop strings; need ``tokenizer``.
        streamer: gets each step's tokens; give it with ``functools.partial``. For one sequence.
        target: ``TransformersTarget(model)``, to check the model once and not with every call.
        policy: ``acceptance``, ``cost``, ``off`` or a cost file, as Engine's.

    Logits processors and stopping criteria are called with one sequence at a time, its padding included.

    Returns:
        [B, n] prompts and new tokens, padded on the right where others went on; a ``GenerateDecoderOnlyOutput`` where
        ``return_dict_in_generate`` is set.

    Raises:
        ConfigError: beams, padding elsewhere, or any other option or input that would be ignored; it is named.
    """
    config = generation_config if generation_config is not None else model.generation_config
    _check(config, input_ids, model_kwargs, synced_gpus)
    count, width = input_ids.shape
    if streamer is not None and count > 1:
        raise ConfigError(f"a streamer shows one sequence, and there are {count}; leave it out")
    for processor in logits_processor or ():
        if count > 1 and isinstance(processor, _BY_ROW):
            raise ConfigError(f"{type(processor).__name__} counts rows of a batch; give it one sequence at a time")
    if target is None:
        target = TransformersTarget(model)
    elif target.model is not model:
        raise ConfigError(f"target wraps another {target.name} than the one whose generate was called; wrap this one")
    sample = bool(config.do_sample)
    if seed is None:
        seeds = torch.randint(1 << 62, (count,)).tolist() if sample else [0] * count
    else:
        seeds = [seed + place for place in range(count)]
    criteria = [c for c in stopping_criteria or () if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    lengths = [c.max_length for c in stopping_criteria or () if isinstance(c, MaxLengthCriteria)]
    budget = int(min(lengths, default=config.max_length)) - width
    eos = torch.as_tensor(() if config.eos_token_id is None else config.eos_token_id).flatten().tolist()
    mask = model_kwargs.get("attention_mask")
    padding = [0] * count if mask is None else (width - mask.sum(-1)).tolist()
    requests = []
    for row, (ids, padded, own) in enumerate(zip(input_ids, padding, seeds, strict=True)):
        options = {
            "sampling": SamplingParams(temperature=float(sample), seed=own, acceptance=acceptance),
            "stop": stop,
            "logits_processor": [_of_row(each, row, ids[:padded]) for each in logits_processor or ()],
            "stop_when": _any_of(ids[:padded], criteria) if criteria else None,
            "eos_ids": frozenset(eos),
        }
        requests.append(Request(ids[padded:], budget, options))
    scheduler = Scheduler(Engine(target, tokenizer, drafter, policy=policy), requests, batch=count)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    texts: list[list[int]] = [[]] * count
    with target.active():
        for event in chain.from_iterable(scheduler.run()):
            if event.error is not None:
                raise event.error
            assert event.decoding is not None
            texts[event.index] = event.decoding.tokens
            if streamer is not None and event.step is not None:
                streamer.put(torch.tensor(event.step.tokens))
    if streamer is not None:
        streamer.end()
    pad = next(iter(eos), 0) if config.pad_token_id is None else config.pad_token_id
    sequences: Any = _together(input_ids, padding, texts, pad)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def _of_row(processor: Any, row: int, padding: torch.Tensor) -> Any:
    """A logits processor of one sequence among several, which it sees behind its padding, as in ``generate``."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):  # the repetition penalty's, of the padding of every row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    if isinstance(processor, Grammar) or (takes_rows(processor) and not len(padding)):
        return processor

    @wraps(processor.__call__, updated=())
    def process(ids: torch.Tensor, scores: torch.Tensor) -> Any:
        with _as_in_generate():
            return processor(torch.cat((padding[None].to(ids), ids), 1), scores.clone())

    process.__qualname__ = getattr(processor, "__qualname__", type(processor).__qualname__)
    return process


def _any_of(padding: torch.Tensor, criteria: Sequence[Any]) -> Callable[[Sequence[int]], bool]:
    """Whether one of the criteria says that a sequence, behind its padding, ends."""

    def stop_when(tokens: Sequence[int]) -> bool:
        with _as_in_generate():
            ids = torch.tensor([[*padding.tolist(), *tokens]], device=padding.device)
            said = [_ends(criterion, criterion(ids, None)) for criterion in criteria]  # all are asked
        return any(said)

    return stop_when


def _ends(criterion: Any, said: Any) -> bool:
    """What a stopping criterion said of one sequence: a bool, or a tensor of one, as ``generate`` takes them."""
    flag = torch.as_tensor(said) if isinstance(said, torch.Tensor | np.bool_ | bool | int) else None
    if flag is None or flag.numel() != 1 or flag.is_floating_point():
        name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
        raise ConfigError(
            f"the stopping criterion {name} returned {shown(said)}, of type {type(said).__name__}; it is asked about "
            "one sequence at a time, and must return True or False, or a tensor of one of them"
        )
    return bool(flag)


@contextmanager
def _as_in_generate() -> Iterator[None]:
    """Callbacks may call the model, also for a gradient, which inference mode would not let them."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _together(ids: torch.Tensor, padding: Sequence[int], texts: Sequence[Sequence[int]], pad: int) -> torch.Tensor:
    """[B, n] texts behind their own padding, and ``pad`` where others are longer."""
    width = max(padded + len(text) for padded, text in zip(padding, texts, strict=True))
    sequences = ids.new_full((len(texts), width), pad)
    for row, own, padded, text in zip(sequences, ids, padding, texts, strict=True):
        row[:padded] = own[:padded]
        row[padded : padded + len(text)] = torch.tensor(text)
    return sequences


# Processors that ask for the number of the row that they are called with, and one that is called alone has number 0.
_BY_ROW = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

# Options of generate's other loops, and of what a step cannot do: option -> why, and the remedy.
_REFUSED = {
    "guidance_scale": "it runs the model once more for every token; unset it or use plain generate",
    "penalty_alpha": "contrastive search chooses its tokens in another way; unset it or use plain generate",
    "dola_layers": "DoLa contrasts logits of early layers; unset it or use plain generate",
    "constraints": "constrained search needs beams; unset it or use plain generate",
    "force_words_ids": "constrained search needs beams; unset it or use plain generate",
    "prompt_lookup_num_tokens": "it asks for transformers' own drafter; unset it and give drafter='prompt_lookup'",
    "assistant_early_exit": "it asks for transformers' own drafter; unset it and give drafter='kangaroo'",
    "use_mtp": "it asks for transformers' own drafter; unset it and name one of specdec's",
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# What generate always prepares, and what changes no token; all else would be ignored, and is refused.
_HARMLESS = (
    *("attention_mask", "position_ids", "past_key_values", "cache_position", "logits_to_keep", "use_cache"),
    *("return_dict", "output_router_logits", "interpolate_pos_encoding"),
)


def _check(config: Any, input_ids: torch.Tensor, inputs: Mapping[str, Any], synced_gpus: bool) -> None:
    """Raises ConfigError for whatever was asked for and would not be done."""
    for name, value in (
        ("num_beams", config.num_beams or 1),
        ("num_return_sequences", config.num_return_sequences or 1),
    ):
        if value > 1:
            raise ConfigError(f"{name} is {value}; specdec decodes each sequence once, without beams: set it to 1")
    for name, reason in _REFUSED.items():
        value = getattr(config, name, None)
        if value and not (name == "guidance_scale" and value == 1):
            raise ConfigError(f"{name} is {value!r}: {reason}")
    for name in _OUTPUTS:
        if getattr(config, name, None):
            raise ConfigError(f"{name}=True: a speculative loop does not keep them; unset it or use plain generate")
    storage = str(getattr(config, "cache_implementation", None) or "")
    if storage.startswith(("offloaded", "quantized")):
        raise ConfigError(f"cache_implementation is {storage!r}; specdec keeps its own cache, on the device: unset it")
    if synced_gpus:
        raise ConfigError("synced_gpus=True (FSDP, ZeRO-3) needs every rank to step alike; specdec's steps differ")
    _check_inputs(input_ids, inputs)


def _check_inputs(input_ids: torch.Tensor, inputs: Mapping[str, Any]) -> None:
    """Raises ConfigError for model inputs other than token ids, padded on the left or not at all."""
    mask, positions, cache = (inputs.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    seen = torch.ones_like(input_ids) if mask is None else mask.long()
    if seen.shape != input_ids.shape or bool((seen.diff(dim=-1) < 0).any()) or not bool(seen[:, -1:].all()):
        raise ConfigError("attention_mask holds zeros behind ones; specdec takes sequences that are padded on the left")
    own = (seen.cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not bool(((positions == own) | (seen == 0)).all()):
        raise ConfigError(f"position_ids are {positions.tolist()}; specdec counts positions from 0: leave them out")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError(
            f"past_key_values holds {cache.get_seq_length()} tokens; specdec keeps its own cache and starts from the "
            "token ids: leave it out"
        )
    for name, value in inputs.items():
        if name not in _HARMLESS and not _says_nothing(name, value):
            given = f"holds {', '.join(map(str, value))}" if isinstance(value, Mapping) else "was given"
            raise ConfigError(f"{name} {given}; specdec feeds the model token ids alone: use plain generate")


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an input is as if it were left out, as what goes with a text alone is."""
    if isinstance(value, torch.Tensor):  # zeros may be a black image or a silence, and the type of a text
        return value.numel() == 0 or (name.endswith("token_type_ids") and not bool(value.any()))
    if isinstance(value, Mapping):
        return all(_says_nothing(str(key), held) for key, held in value.items())
    if isinstance(value, list | tuple):
        return all(_says_nothing(name, held) for held in value)
    return value is None or value is (name == "is_causal")  # a flag that is not raised
