"""A grammar that is not in this package: JSON that follows a schema, by llguidance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerFast


class JsonSchema:
    """A JSON schema, compiled for a tokenizer and the model's vocabulary."""

    def __init__(self, schema: str, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        self.matcher = LLMatcher(from_tokenizer(tokenizer, n_vocab=vocab_size), grammar)
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error())

    def start(self, prompt: Sequence[int]) -> JsonState:
        return JsonState(self.matcher.deep_copy())


class JsonState:
    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def advance(self, token: int) -> JsonState | None:
        other = self.matcher.deep_copy()
        return JsonState(other) if other.consume_token(token) else None  # behind the end, it takes ends alone

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[-1]]
        return scores.masked_fill(torch.from_numpy(allowed == 0), -math.inf)
