"""Logits processors for all rows of a step at once: which processors allow it, and how they are called.

A processor in transformers' form takes a batch of texts of equal length. Rows of equal depth are such a batch, but a
processor may treat a row of a batch otherwise than a single row: it may keep state between calls, or count the rows. So
only processors of transformers that do neither are called this way. They also read nothing back from a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    ClassifierFreeGuidanceLogitsProcessor,
    EpsilonLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.logits_process import (
    DiaClassifierFreeGuidanceLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
    WhisperNoSpeechDetection,
)

from specdec.errors import ConfigError, shown
from specdec.sampling.grammar import Grammar, Matcher, States
from specdec.settings.sampling_params import SamplingParams
from specdec.step import device_copies
from specdec.step.torch_switches import writes_to

__all__ = [
    "FREE",
    "check_processors",
    "check_scores",
    "forbidden",
    "is_repeatable",
    "judged",
    "kept_by",
    "masked",
    "name_of",
    "settled",
    "takes_rows",
]

FREE = (
    EpsilonLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors of transformers that never read the text and write nothing in place."""

_BY_DEPTH = (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)


_STATEFUL = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs the model itself, one token after the other",
    SynthIDTextWatermarkLogitsProcessor: "keeps the contexts of the tokens that it was asked about",
    WhisperNoSpeechDetection: "runs the model itself, and keeps what it said",
    DiaEOSDelayPatternLogitsProcessor: "keeps how far each sequence is from its end",
    ClassifierFreeGuidanceLogitsProcessor: "mixes two texts, with and without a prompt",
    DiaClassifierFreeGuidanceLogitsProcessor: "mixes two texts, with and without a prompt",
}
"""Processors of transformers whose result is not a function of the text and its scores, and why."""


def check_processors(processors: Sequence[Any]) -> None:
    """Raises ConfigError for processors that are known to change the text when drafts are verified."""
    for processor in processors:
        if isinstance(processor, LogitsProcessorList):
            check_processors(processor)
        for kind, reason in _STATEFUL.items():
            if isinstance(processor, kind):
                raise ConfigError(
                    f"the logits processor {name_of(processor)} {reason}, and verification asks about the tokens of a "
                    "draft; leave it out, or use plain generate"
                )


def is_repeatable(processor: Any) -> bool:
    """Whether a processor's result is known not to depend on earlier calls; a user's own processor is not known."""
    inner = getattr(processor, "__wrapped__", processor)  # custom_generate wraps processors to show them padding
    return isinstance(inner, Grammar) or type(inner).__module__ == LogitsProcessor.__module__


def kept_by(processor: Any) -> dict[str, Any]:
    """A processor's attributes in a form that differs once one was changed: numbers, object ids and sizes."""
    held = getattr(processor, "__dict__", {})
    return {
        name: value
        if isinstance(value, int | float | str | None)
        else (id(value), writes_to(value) if isinstance(value, torch.Tensor) else _len(value))
        for name, value in held.items()
    }


def _len(value: Any) -> int | None:
    return len(value) if isinstance(value, Sized) else None


def settled(sampling: SamplingParams, processors: Sequence[Any]) -> SamplingParams:
    """The sampling parameters with ``acceptance="auto"`` resolved for these processors.

    ``match`` calls processors once per token of the text, in order, as plain decoding does, so a processor may keep
    state between calls. ``reject`` calls them for all tokens of a draft.
    """
    if sampling.acceptance == "auto" and not all(map(is_repeatable, processors)):
        return replace(sampling, acceptance="match")
    return sampling


def takes_rows(processor: Any) -> bool:
    """Whether ``judged`` supports the processor. Subclasses may do anything, so only the exact classes count."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):  # a length per row of a batch
        return False
    return isinstance(processor, States) or type(processor) in FREE or type(processor) in _BY_DEPTH


def judged(processor: Any, ids: Any, logits: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Logits [R, V] after a processor of transformers that ``takes_rows``.

    Args:
        processor: the processor; not a grammar.
        ids: int64 [R, L], each row's text, padded with any of its tokens; not read if the processor is ``FREE``.
        logits: [R, V].
        lengths: lengths of the R texts.
    """
    # This penalty depends only on which tokens a text contains, so padding with repeated tokens does not change it.
    plain = type(processor) is RepetitionPenaltyLogitsProcessor and processor.prompt_ignore_length is None
    if plain or type(processor) in FREE:
        return processor(ids, logits)  # type: ignore[no-any-return]
    groups: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        groups.setdefault(length, []).append(place)
    parts = [
        processor(device_copies.pick(ids, places)[:, :length], device_copies.pick(logits, places))
        for length, places in groups.items()
    ]
    order = [place for places in groups.values() for place in places]
    return device_copies.pick(torch.cat(parts), sorted(range(len(order)), key=order.__getitem__))


def masked(states: States, tokens: Sequence[int], paths: Sequence[Sequence[int]], scores: torch.Tensor) -> torch.Tensor:
    """Scores [R, V] on a device, masked by a grammar's states after the text and each of R paths.

    Masks are made on the host, while the device may still compute the scores, and sent in one copy. A matcher that gets
    scores on a device would make the device wait for a mask from the host, or refuse them.

    Raises:
        ConfigError: a matcher changed scores otherwise than by masking.
    """
    mask, dtype = forbidden([states.after(tokens, path) for path in paths], scores.shape[-1], scores.dtype)
    return scores.to(dtype).masked_fill(
        device_copies.copy_in({"forbidden": mask}, scores.device)["forbidden"], -math.inf
    )


def forbidden(
    states: Sequence[Matcher | None], size: int, dtype: torch.dtype
) -> tuple[npt.NDArray[np.bool_], torch.dtype]:
    """[R, V] the tokens that may not follow each state (None allows all), and the dtype of masked scores."""
    masks, result_dtype = np.zeros((len(states), size), dtype=np.bool_), dtype
    for own, state in zip(masks, states, strict=True):
        if state is None:
            continue
        left = state.mask(torch.ones(1, size, dtype=dtype))
        check_scores(state, left, (1, size))
        own[:], result_dtype = (left[0] == -math.inf).numpy(), left.dtype
        if not bool((left[0] == 1).logical_or_(torch.from_numpy(own)).all()):
            raise ConfigError(
                f"the mask of {type(state).__qualname__} changed scores of tokens that may follow; it must set those "
                "of all others to -inf, and do nothing else"
            )
    return masks, result_dtype


def check_scores(processor: Any, scores: Any, shape: Sequence[int]) -> None:
    """Raises ConfigError where a logits processor did not return scores."""
    if isinstance(scores, torch.Tensor):
        if scores.shape == shape and scores.is_floating_point():
            return
        what = f"{str(scores.dtype).removeprefix('torch.')} of shape {list(scores.shape)}"
    else:
        what = f"{shown(scores)}, of type {type(scores).__name__}"
    raise ConfigError(
        f"the logits processor {name_of(processor)} returned {what}; it must return scores, floats of shape "
        f"{list(shape)}"
    )


def name_of(processor: Any) -> str:
    """A processor's name for messages: the function's, the class's, or the grammar's if it is a grammar's state."""
    named = processor.grammar if isinstance(processor, States) else processor
    return str(getattr(named, "__qualname__", type(named).__qualname__))
