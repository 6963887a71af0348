"""A grammar that is not in this package: JSON that follows a schema, by xgrammar."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xgrammar
from transformers import PreTrainedTokenizerBase

from specdec.sampling.grammar import Ended


class JsonSchema:
    """A JSON schema, compiled for a tokenizer and the model's vocabulary."""

    def __init__(self, schema: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        described = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self.compiled = xgrammar.GrammarCompiler(described).compile_json_schema(schema, any_whitespace=False)

    def start(self, prompt: Sequence[int]) -> JsonState:
        return JsonState(xgrammar.GrammarMatcher(self.compiled))


class JsonState:
    def __init__(self, matcher: xgrammar.GrammarMatcher) -> None:
        self.matcher = matcher

    def advance(self, token: int) -> JsonState | Ended | None:
        other = self.matcher.fork()
        if not other.accept_token(token):
            return None
        return Ended([token]) if other.is_terminated() else JsonState(other)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        allowed = xgrammar.allocate_token_bitmask(1, scores.shape[-1])
        self.matcher.fill_next_token_bitmask(allowed)
        masked = scores.to(torch.float32, copy=True)
        xgrammar.apply_token_bitmask_inplace(masked, allowed)
        return masked
