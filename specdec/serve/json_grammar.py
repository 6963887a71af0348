"""JSON by a schema: xgrammar's matchers behind the interface :class:`specdec.sampling.grammar.Grammar`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import xgrammar

from specdec.errors import first_line
from specdec.sampling.grammar import Ended
from specdec.serve.errors import ApiError

__all__ = ["Grammars", "JsonGrammar"]

_KEPT = 64  # number of compiled grammars in the cache, least recently used dropped first


class Grammars:
    """Compiles schemas for a tokenizer and caches the latest. One thread at a time may use it."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> None:
        described = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(end_tokens) or None
        )
        self._compiler = xgrammar.GrammarCompiler(described, max_threads=1)
        self._compiled = lru_cache(_KEPT)(self._compile)

    def any_object(self) -> JsonGrammar:
        """The grammar of any JSON object."""
        return self.of({"type": "object"})

    def of(self, schema: Mapping[str, Any], param: str = "response_format") -> JsonGrammar:
        """The grammar of a JSON schema, without whitespace between tokens of JSON.

        Raises:
            ApiError: xgrammar cannot compile the schema.
        """
        try:
            return JsonGrammar(self._compiled(json.dumps(schema)))
        except Exception as error:  # xgrammar raises RuntimeError and other types
            raise ApiError(
                f"{param} has a JSON schema that cannot be followed: {first_line(error)}; change the schema",
                param=param,
                code="invalid_json_schema",
            ) from error

    def _compile(self, schema: str) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(schema, any_whitespace=False)


class JsonGrammar:
    """A compiled schema."""

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled
        self._ends = compiled.tokenizer_info.stop_token_ids

    def start(self, prompt: Sequence[int]) -> JsonState:
        return JsonState(xgrammar.GrammarMatcher(self._compiled), self._ends)


class JsonState:
    """The state of one text under a grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, ends: Collection[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def advance(self, token: int) -> JsonState | Ended | None:
        other = self._matcher.fork()
        if not other.accept_token(token):
            return None
        return Ended(self._ends) if other.is_terminated() else JsonState(other, self._ends)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        allowed = xgrammar.allocate_token_bitmask(1, scores.shape[-1])
        self._matcher.fill_next_token_bitmask(allowed)
        masked = scores.to(torch.float32, copy=True)
        xgrammar.apply_token_bitmask_inplace(masked, allowed)
        return masked
