"""OpenAI's options that change scores: biases of tokens, and penalties for those that the answer has already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import SequenceBiasLogitsProcessor

from specdec.errors import shown
from specdec.serve.errors import ApiError

__all__ = ["Penalties", "bias_of"]


class Penalties:
    """Lowers the scores of the tokens of the answer: once for each that is there, and again for each time it is.

    A token's score loses ``presence`` if the answer has it, and ``frequency`` times how often; the prompt counts for
    nothing.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, V] after the text [1, n]."""
        counts = torch.bincount(ids[0, self._prompt_tokens :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self._presence * (counts > 0) - self._frequency * counts


def bias_of(biases: Mapping[str, float], vocab_size: int) -> Any:
    """Transformers' processor that adds a number to the scores of tokens.

    Raises:
        ApiError: a key that is no token of the model.
    """
    found: dict[tuple[int, ...], float] = {}
    for name, bias in biases.items():
        if not (name.isdecimal() and int(name) < vocab_size):
            raise ApiError(
                f"logit_bias has the key {shown(name)}; its keys are token ids in [0, {vocab_size}), as /tokenize "
                "gives them",
                param="logit_bias",
                code="invalid_value",
            )
        found[(int(name),)] = float(bias)
    return SequenceBiasLogitsProcessor(found)  # type: ignore[arg-type]  # its own annotation lacks this form
