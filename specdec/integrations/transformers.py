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

from specdec.drafter import Drafter
from specdec.engine import Engine
from specdec.errors import ConfigError
from specdec.sampling import SamplingParams
from specdec.target import TransformersTarget

__all__ = ["custom_generate"]


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
    budget: str = "off",
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
        budget: ``off``, ``auto`` or a cost file, as Engine's.

    Returns:
        [1, n] prompt and new tokens; a ``GenerateDecoderOnlyOutput`` where ``return_dict_in_generate`` is set.

    Raises:
        ConfigError: beams, several sequences, padding, or outputs that a speculative loop does not have.
    """
    config = generation_config if generation_config is not None else model.generation_config
    _check(config, input_ids, model_kwargs.get("attention_mask"), synced_gpus)
    training = model.training
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

    prompt = input_ids[0].tolist()
    engine = Engine(target, tokenizer, drafter, budget=budget)
    decoding = engine.start(
        prompt,
        _longest(config, stopping_criteria) - len(prompt),
        SamplingParams(temperature=float(sample), seed=seed, acceptance=acceptance),
        stop=stop,
        logits_processor=logits_processor or (),
        stop_when=stop_when if rest else None,
        eos_ids=_eos_ids(config),
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    try:
        with target.active():
            decoding.prefill()
            while decoding.finish_reason is None:
                step = decoding.step()
                if streamer is not None:
                    streamer.put(torch.tensor(step.tokens))
    finally:
        if training:
            model.train()  # as it was; the target switched its dropout off
    if streamer is not None:
        streamer.end()
    sequences: Any = torch.tensor([decoding.tokens], device=input_ids.device, dtype=input_ids.dtype)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def _longest(config: Any, stopping_criteria: Any) -> int:
    lengths = [c.max_length for c in stopping_criteria or () if isinstance(c, MaxLengthCriteria)]
    return int(min(lengths)) if lengths else int(config.max_length)


def _eos_ids(config: Any) -> frozenset[int]:
    ids = config.eos_token_id
    return frozenset(() if ids is None else [int(ids)] if isinstance(ids, int) else [int(i) for i in ids])


def _check(config: Any, input_ids: torch.Tensor, mask: torch.Tensor | None, synced_gpus: bool) -> None:
    for name, value, most in (
        ("num_beams", config.num_beams or 1, 1),
        ("num_return_sequences", config.num_return_sequences or 1, 1),
        ("the batch size", input_ids.shape[0], 1),
    ):
        if value > most:
            raise ConfigError(f"{name} is {value}; specdec decodes one sequence per call, without beams: set it to 1")
    wanted = [
        n
        for n in ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
        if getattr(config, n, None)
    ]
    if wanted:
        raise ConfigError(f"{wanted[0]}=True: a speculative loop does not keep them; unset it or use plain generate")
    if mask is not None and not bool(mask.all()):
        raise ConfigError("attention_mask holds zeros; specdec takes one unpadded sequence: drop the padding")
    if synced_gpus:
        raise ConfigError("synced_gpus=True (FSDP, ZeRO-3) needs every rank to step alike; specdec's steps differ")
