"""Logits processors on all rows of a step at once: which of them may be asked so, and how.

A processor in transformers' form takes a batch of texts of one length. Rows of equal depth are such a batch, but not
every processor judges each of its rows as it would by itself: it may keep something between calls, or count the rows.
So only transformers' own are asked this way, which do not, and read nothing back from a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    EpsilonLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec.errors import ConfigError, shown
from specdec.sampling.grammar import Matcher, States
from specdec.step import device_copies

__all__ = ["FREE", "check_scores", "forbidden", "judged", "masked", "takes_rows"]

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
"""Transformers' own that never look at the text, and write nothing in place."""

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


def takes_rows(processor: Any) -> bool:
    """Whether ``judged`` serves it. A subclass may do anything, so it has to be one of these classes itself."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):  # one for each row of a batch
        return False
    return isinstance(processor, States) or type(processor) in FREE or type(processor) in _BY_DEPTH


def judged(processor: Any, ids: Any, logits: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Logits [R, V] after a processor of transformers that ``takes_rows``.

    Args:
        processor: one that is no grammar.
        ids: int64 [R, L], each row's text, filled up with any of its tokens; what, if the processor is ``FREE``, is
            all the same.
        logits: [R, V].
        lengths: of the R texts.
    """
    # Which tokens a text has is all that this penalty asks, so that repeated ones make no difference to it.
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
    """Scores [R, V] on a device, after a grammar's states behind the text and each of R paths.

    Masks are made on the host, while the device may still compute the scores, and sent with one copy: a matcher that
    is given scores on a device makes it wait for a mask that comes from the host, or refuses them (as xgrammar does).

    Raises:
        ConfigError: what a matcher made of scores is no mask of them.
    """
    found, dtype = forbidden([states.after(tokens, path) for path in paths], scores.shape[-1], scores.dtype)
    return scores.to(dtype).masked_fill(
        device_copies.copy_in({"forbidden": found}, scores.device)["forbidden"], -math.inf
    )


def forbidden(
    states: Sequence[Matcher | None], size: int, dtype: torch.dtype
) -> tuple[npt.NDArray[np.bool_], torch.dtype]:
    """[R, V] which tokens may not follow each state, none where it is None; and what scores of ``dtype`` become."""
    found, made = np.zeros((len(states), size), dtype=np.bool_), dtype
    for own, state in zip(found, states, strict=True):
        if state is None:
            continue
        left = state.mask(torch.ones(1, size, dtype=dtype))
        check_scores(state, left, (1, size))
        own[:], made = (left[0] == -math.inf).numpy(), left.dtype
        if not bool((left[0] == 1).logical_or_(torch.from_numpy(own)).all()):
            raise ConfigError(
                f"the mask of {type(state).__qualname__} changed scores of tokens that may follow; it must set those "
                "of all others to -inf, and do nothing else"
            )
    return found, made


def check_scores(processor: Any, scores: Any, shape: Sequence[int]) -> None:
    """Raises ConfigError where a logits processor did not return scores."""
    if isinstance(scores, torch.Tensor):
        if scores.shape == shape and scores.is_floating_point():
            return
        what = f"{str(scores.dtype).removeprefix('torch.')} of shape {list(scores.shape)}"
    else:
        what = f"{shown(scores)}, of type {type(scores).__name__}"
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    raise ConfigError(
        f"the logits processor {name} returned {what}; it must return scores, floats of shape {list(shape)}"
    )
