"""``model.generate(..., custom_generate=functools.partial(specdec.custom_generate, drafter="lookahead"))``.

Transformers prepares inputs, logits processors and stopping criteria as for its own loop and calls this instead of it.
It hands neither streamer nor stop strings to a custom loop: give those with ``functools.partial``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.arguments import checked
from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.model import TransformersTarget
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
    """Decode one sequence with a drafter, inside transformers' ``generate``.

    Args:
        drafter: name, ``{"name": ..., **options}`` or drafter.
        seed: of the sampling noise; None draws one from torch's generator, so that ``torch.manual_seed`` governs it.
        acceptance: as ``SamplingParams``'; with ``match`` a seed's text is the same under every drafter.
        stop: stop strings; need ``tokenizer``.
        streamer: gets each step's tokens; give it with ``functools.partial``.
        target: ``TransformersTarget(model)``, to check the model once and not with every call.
        policy: ``acceptance``, ``cost``, ``off`` or a cost file, as Engine's.

    Returns:
        [1, n] prompt and new tokens; a ``GenerateDecoderOnlyOutput`` where ``return_dict_in_generate`` is set.

    Raises:
        ConfigError: beams, several sequences, padding, or any other option or input that would be ignored; it is named.
    """
    config = generation_config if generation_config is not None else model.generation_config
    _check(config, input_ids, model_kwargs, synced_gpus)
    if target is None:
        target = TransformersTarget(model)
    elif target.model is not model:
        raise ConfigError(f"target wraps another {target.name} than the one whose generate was called; wrap this one")
    sample = bool(config.do_sample)
    if seed is None:
        seed = int(torch.randint(1 << 62, ())) if sample else 0
    rest = [c for c in stopping_criteria or () if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]

    def stop_when(tokens: Sequence[int]) -> bool:
        ids = torch.tensor([tokens], device=input_ids.device)
        return any(bool(criterion(ids, None).all()) for criterion in rest)

    lengths = [c.max_length for c in stopping_criteria or () if isinstance(c, MaxLengthCriteria)]
    eos = () if config.eos_token_id is None else config.eos_token_id
    prompt = input_ids[0].tolist()
    engine = Engine(target, tokenizer, drafter, policy=policy)
    decoding = engine.start(
        prompt,
        int(min(lengths, default=config.max_length)) - len(prompt),
        SamplingParams(temperature=float(sample), seed=seed, acceptance=acceptance),
        stop=stop,
        logits_processor=logits_processor or (),
        stop_when=stop_when if rest else None,
        eos_ids=frozenset(torch.as_tensor(eos).flatten().tolist()),
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with target.active():
        decoding.prefill()
        while decoding.finish_reason is None:
            step = decoding.step()
            if streamer is not None:
                streamer.put(torch.tensor(step.tokens))
    if streamer is not None:
        streamer.end()
    sequences: Any = torch.tensor([decoding.tokens], device=input_ids.device, dtype=input_ids.dtype)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


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
_HARMLESS = ("attention_mask", "position_ids", "past_key_values", "cache_position", "logits_to_keep", "use_cache")


def _check(config: Any, input_ids: torch.Tensor, inputs: Mapping[str, Any], synced_gpus: bool) -> None:
    """Raises ConfigError for whatever was asked for and would not be done."""
    for name, value in (
        ("num_beams", config.num_beams or 1),
        ("num_return_sequences", config.num_return_sequences or 1),
        ("the batch size", input_ids.shape[0]),
    ):
        if value > 1:
            raise ConfigError(f"{name} is {value}; specdec decodes one sequence per call, without beams: set it to 1")
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
    """Raises ConfigError for model inputs other than one unpadded sequence of token ids."""
    mask, positions, cache = (inputs.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    if mask is not None and not bool(mask.all()):
        raise ConfigError("attention_mask holds zeros; specdec takes one unpadded sequence: drop the padding")
    if positions is not None and positions.flatten().tolist() != list(range(positions.shape[-1])):
        raise ConfigError(f"position_ids are {positions.tolist()}; specdec counts positions from 0: leave them out")
    if cache is not None and cache.get_seq_length() > 0:
        raise ConfigError(
            f"past_key_values holds {cache.get_seq_length()} tokens; specdec keeps its own cache and starts from the "
            "token ids: leave it out"
        )
    for name, value in inputs.items():
        if name not in _HARMLESS and value is not None and not _is_zero(value):
            raise ConfigError(f"{name} was given; specdec feeds the model token ids alone: use plain generate")


def _is_zero(value: Any) -> bool:
    """Whether an input says nothing, as text-only token_type_ids do."""
    return isinstance(value, bool) or (isinstance(value, torch.Tensor) and not bool(value.any()))
