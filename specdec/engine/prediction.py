"""Predictions: the expected answer as tokens, and how much of it the actual answer holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdec.errors import PromptError, shown

__all__ = ["Prediction", "appeared", "prediction_ids"]

Prediction = str | Sequence[int] | torch.Tensor


def prediction_ids(prediction: Prediction | None, tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a prediction, without special tokens at the start; empty for None and an empty prediction.

    Raises:
        PromptError: it is neither text nor token ids, it is text and there is no tokenizer, or a token is outside the
            vocabulary.
    """
    if prediction is None:
        return []
    if isinstance(prediction, str):
        if not prediction:
            return []
        if tokenizer is None:
            raise PromptError("the prediction is text, and this engine has no tokenizer; give token ids")
        try:
            prediction.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prediction holds {prediction[error.start]!r} at character {error.start}, half a character that "
                "no tokenizer reads; decode its bytes with errors='replace'"
            ) from error
        ids = list(tokenizer(prediction, add_special_tokens=False)["input_ids"])
    else:
        ids = _sequence(prediction)
    for place, token in enumerate(ids):
        if not isinstance(token, int | np.integer) or isinstance(token, bool):
            raise PromptError(
                f"the prediction's item {place} is {shown(token)}, of type {type(token).__name__}; give text or token "
                "ids, which are integers"
            )
        if not 0 <= token < vocab_size:
            raise PromptError(
                f"the prediction holds token {shown(token)} at place {place}, which is outside the vocabulary "
                f"[0, {vocab_size}); the ids come from another tokenizer"
            )
    return [int(token) for token in ids]


def _sequence(prediction: Any) -> list[Any]:
    if hasattr(prediction, "tolist") and getattr(prediction, "ndim", 0) == 1:
        prediction = prediction.tolist()
    if not isinstance(prediction, Sequence) or isinstance(prediction, bytes | bytearray | memoryview):
        raise PromptError(
            f"the prediction is {shown(prediction)}, of type {type(prediction).__name__}; give text or token ids"
        )
    return list(prediction)


def appeared(prediction: Sequence[int], text: Sequence[int]) -> int:
    """The length of the longest sequence that both have in common when tokens of either are left out.

    Bit i of a number stands for the prediction's token i, so that a token of the text is one sum (Hyyro 2004,
    "Bit-parallel LCS-length computation revisited").
    """
    places: dict[int, int] = {}
    for place, token in enumerate(prediction):
        places[token] = places.get(token, 0) | 1 << place
    all_bits = (1 << len(prediction)) - 1
    left = all_bits
    for token in text:
        met = left & places.get(token, 0)
        left = ((left + met) | (left - met)) & all_bits
    return len(prediction) - left.bit_count()
