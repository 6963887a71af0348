"""OpenAI's options that change scores: ``logit_bias``, and the presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import SequenceBiasLogitsProcessor

from specdec.errors import shown
from specdec.serve.errors import ApiError

__all__ = ["Penalties", "bias_of"]


class Penalties:
    """Lowers the scores of tokens that the answer already has.

    A token's score loses ``presence`` once, and ``frequency`` for each time that the answer has it. The prompt's tokens
    do not count.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The penalised scores [1, V] behind the token ids [1, n]."""
        counts = torch.bincount(ids[0, self._prompt_tokens :], minlength=scores.shape[-1]).to(scores.dtype)
        return scores - self._presence * (counts > 0) - self._frequency * counts


def bias_of(biases: Mapping[str, float], vocab_size: int) -> Any:
    """The transformers processor that adds ``logit_bias`` to the scores.

    Raises:
        ApiError: a key is not a token id of the model.
    """
    found: dict[tuple[int, ...], float] = {}
    for name, bias in biases.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 20 and int(name) < vocab_size):
            raise ApiError(
                f"logit_bias has the key {shown(name)}; its keys are token ids in [0, {vocab_size}), as /tokenize "
                "gives them",
                param="logit_bias",
            )
        found[(int(name),)] = float(bias)
    return SequenceBiasLogitsProcessor(found)  # type: ignore[arg-type]  # its own annotation lacks this form
