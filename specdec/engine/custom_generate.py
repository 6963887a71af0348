"""``model.generate(..., custom_generate=functools.partial(specdec.custom_generate, drafter="lookahead"))``.

Transformers prepares inputs, logits processors and stopping criteria as for its own loop, and calls this function in
its place. It passes neither streamer nor stop strings to a custom loop: give them with ``functools.partial``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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

from specdec.drafting.registry import DrafterSpec
from specdec.engine.engine import Engine
from specdec.engine.generate_options import check_arguments, check_inputs, check_options, check_preparation
from specdec.engine.requests import Request
from specdec.engine.scheduler import Scheduler
from specdec.errors import ConfigError, shown
from specdec.models.around_layers import LOOP
from specdec.models.transformers_target import TransformersTarget
from specdec.sampling.grammar import Grammar
from specdec.sampling.processors import check_processors, is_repeatable, kept_by, name_of, settled, takes_rows
from specdec.settings.arguments import checked
from specdec.settings.sampling_params import SamplingParams
from specdec.step import torch_switches

__all__ = ["custom_generate"]

_LONGEST = 1 << 40  # no criterion of the length


@torch_switches.uncompiled
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
    drafter: DrafterSpec = "prompt_lookup",
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
        seed: seed of the sampling noise; a sequence's place in the batch is added. None draws seeds from torch's
            generator, so that ``torch.manual_seed`` sets them.
        acceptance: as ``SamplingParams``'; with ``match`` a seed's text is the same under every drafter.
        stop: stop strings; need ``tokenizer``.
        streamer: gets each step's tokens; give it with ``functools.partial``. For one sequence.
        target: ``TransformersTarget(model)``, to check the model once and not with every call.
        policy: ``acceptance``, ``off`` or a cost file, as Engine's.

    Logits processors and stopping criteria are called with one sequence at a time, its padding included. For one
    sequence they are called once per token, in order. Under ``reject`` and ``typical`` they are also called for tokens
    of drafts, so a processor that keeps state between calls is correct only under ``match``.

    Returns:
        [B, n] prompts and new tokens, padded on the right; with ``return_dict_in_generate`` a
        ``GenerateDecoderOnlyOutput`` that holds only the sequences.

    Raises:
        ConfigError: beams, padding elsewhere, or any other option or input that would be ignored; it is named.
        TargetError: the model, or peft, does something in ``generate`` that specdec does not; it is named.
    """
    config = generation_config
    seen = _check(model, input_ids, logits_processor, stopping_criteria, config, model_kwargs, synced_gpus)
    count, width = input_ids.shape
    if streamer is not None and count > 1:
        raise ConfigError(f"a streamer shows one sequence, and there are {count}; leave it out")
    if target is None:
        target = TransformersTarget(model)
    elif not isinstance(target, TransformersTarget) or target.model is not model:
        raise ConfigError(f"target wraps another {target.name} than the one whose generate was called; wrap this one")
    target.whole.check_methods(LOOP)
    check_preparation(model, input_ids, model_kwargs)
    sample = bool(config.do_sample)
    if seed is None:
        seeds = torch.randint(1 << 62, (count,), device="cpu").tolist() if sample else [0] * count
    else:
        seeds = [seed + place for place in range(count)]
    padding = [ids[: width - held] for ids, held in zip(input_ids, seen.sum(-1).tolist(), strict=True)]
    ends = _Ends(stopping_criteria, padding)
    budget = max(1, ends.length - width)  # as in generate, which asks behind a token
    sampling = settled(SamplingParams(temperature=float(sample), acceptance=acceptance), logits_processor)
    requests = []
    for row, (ids, padded, own) in enumerate(zip(input_ids, padding, seeds, strict=True)):
        requests.append(
            Request(
                ids[len(padded) :],
                budget,
                replace(sampling, seed=own),
                stop=stop,
                logits_processor=[_of_row(each, row, padded, several=count > 1) for each in logits_processor],
                stop_when=ends.of(row),
                eos_ids=ends.tokens,
            )
        )
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
    known = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id, device="cpu").flatten().tolist()
    pad = config.pad_token_id if config.pad_token_id is not None else known[0] if known else 0
    sequences: Any = _together(input_ids, padding, ends.cut(texts), pad)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


def _check(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    inputs: Mapping[str, Any],
    synced_gpus: bool,
) -> torch.Tensor:
    """[B, n] which tokens are no padding.

    Raises:
        ConfigError: something was asked for that would not be done.
    """
    if config is None or processors is None or criteria is None:
        raise ConfigError(
            "custom_generate needs the logits processors and stopping criteria that generate makes of its options; "
            "call model.generate(..., custom_generate=specdec.custom_generate)"
        )
    check_arguments(model, synced_gpus)
    check_options(config)
    seen = check_inputs(input_ids, inputs)
    check_processors(processors)
    for processor in processors:
        if len(input_ids) > 1 and isinstance(processor, _BY_ROW):
            raise ConfigError(f"{type(processor).__name__} counts rows of a batch; give it one sequence at a time")
    return seen


def _of_row(processor: Any, row: int, padding: torch.Tensor, *, several: bool) -> Any:
    """A logits processor of one sequence among several, which it sees behind its padding, as in ``generate``."""
    watched, called = several and not is_repeatable(processor), False
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, torch.Tensor):  # the repetition penalty's, of the padding of every row
        processor = copy.copy(processor)
        processor.prompt_ignore_length = ignored[row : row + 1]
    if isinstance(processor, Grammar) or (takes_rows(processor) and not len(padding)):
        return processor

    def process(ids: torch.Tensor, scores: torch.Tensor) -> Any:
        nonlocal called
        before = kept_by(processor) if watched and called else {}  # the first call may prepare something
        with _as_in_generate():
            row_scores = processor(torch.cat((padding[None].to(ids), ids), 1), scores.clone())
        called = True
        if before and (changed := [name for name, value in kept_by(processor).items() if before.get(name) != value]):
            raise ConfigError(
                f"the logits processor {name_of(processor)} keeps something between calls ({', '.join(changed)}), and "
                "is called with one sequence at a time, so several would mix it up; decode them one by one"
            )
        return row_scores

    process.__qualname__ = name_of(processor)
    vars(process)["__wrapped__"] = processor
    return process


class _Ends:
    """What ends texts: their length, end tokens, or what other criteria say of each.

    The criteria are taken as they are, as a user's own take the place of those that ``generate`` makes; subclasses are
    asked. Where none knows end tokens, ``generate`` goes on with all texts until the last one has ended; so do these.

    Args:
        padding: [B][...] of each text.
    """

    def __init__(self, criteria: Sequence[Any], padding: Sequence[torch.Tensor]) -> None:
        lengths = [int(one.max_length) for one in criteria if type(one) is MaxLengthCriteria]
        self.length = min(lengths, default=_LONGEST)
        ends = [one for one in criteria if type(one) is EosTokenCriteria]
        self.tokens = frozenset(token for one in ends for token in one.eos_token_id.flatten().tolist())
        self._asked = [one for one in criteria if type(one) not in (MaxLengthCriteria, EosTokenCriteria)]
        self._padding = padding
        self._alone = len(padding) == 1 or any(hasattr(one, "eos_token_id") for one in criteria)
        self._last: dict[int, int] = {}  # text -> its length where it ended

    def of(self, row: int) -> Callable[[Sequence[int]], bool] | None:
        """Whether a text ends, without its padding."""
        padding = self._padding[row]

        def stop_when(tokens: Sequence[int]) -> bool:
            with _as_in_generate():
                ids = torch.tensor([[*padding.tolist(), *tokens]], device=padding.device)
                results = [_ends(criterion, criterion(ids, None)) for criterion in self._asked]  # all are asked
            if any(results):
                self._last.setdefault(row, ids.shape[1])
            return row in self._last if self._alone else ids.shape[1] >= self._longest

        return stop_when if self._asked else None

    @property
    def _longest(self) -> int:
        """The length at which the last text has ended."""
        return max(self._last.values()) if len(self._last) == len(self._padding) else self.length

    def cut(self, texts: Sequence[list[int]]) -> list[list[int]]:
        """Texts that went on until the last had ended, without what they have more."""
        if self._alone or not self._asked:
            return [*texts]
        return [text[: self._longest - len(padded)] for text, padded in zip(texts, self._padding, strict=True)]


def _ends(criterion: Any, result: Any) -> bool:
    """Whether a stopping criterion ended one sequence; it may return a bool, or a tensor, array or list of one."""
    plain = isinstance(result, torch.Tensor | np.ndarray | np.generic | bool | int | list | tuple)
    try:
        flag = torch.as_tensor(np.array(result) if isinstance(result, np.generic) else result) if plain else None
    except (TypeError, ValueError, RuntimeError):
        flag = None
    if flag is None or flag.numel() != 1 or flag.is_floating_point():
        name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
        raise ConfigError(
            f"the stopping criterion {name} returned {shown(result)}, of type {type(result).__name__}; it is asked "
            "about one sequence at a time, and must return True or False, or a tensor or list of one of them"
        )
    return bool(flag)


@contextmanager
def _as_in_generate() -> Iterator[None]:
    """Callbacks may call the model, also for a gradient, which inference mode would not let them."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _together(
    ids: torch.Tensor, padding: Sequence[torch.Tensor], texts: Sequence[Sequence[int]], pad: int
) -> torch.Tensor:
    """[B, n] texts behind their own padding, and ``pad`` where others are longer."""
    width = max(len(padded) + len(text) for padded, text in zip(padding, texts, strict=True))
    sequences = ids.new_full((len(texts), width), pad)
    for row, padded, text in zip(sequences, padding, texts, strict=True):
        row[: len(padded)] = padded
        row[len(padded) : len(padded) + len(text)] = torch.tensor(text, device=row.device)
    return sequences


# Processors that ask for the number of the row that they are called with, and one that is called alone has number 0.
_BY_ROW = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
