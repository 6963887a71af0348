"""Grammars of llguidance behind the interface :class:`specdec.sampling.grammar.Grammar`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from specdec.errors import first_line
from specdec.sampling.grammar import Ended
from specdec.serve.errors import ApiError
from specdec.serve.thinking import Thinking, thinking_grammar

__all__ = ["Grammars", "JsonGrammar", "NoGrammar"]

_KEPT = 64  # number of compiled grammars in the cache, least recently used dropped first
_MAX_BYTES = 1 << 20  # of a grammar
_OPTIONS = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False, "lenient": False}
_OPTIONS |= {"coerce_one_of": False}


def _limits() -> LLParserLimits:
    """Bounds of what a grammar may take: some 20 ms when it is made and for each mask, and 50 MB."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000,
        max_items_in_row=10_000,  # an object of many properties, all of which may be left out
        max_lexer_states=30_000,
        max_grammar_size=500_000,
        verbose_errors=False,  # errors would hold the schema and the text
    )


class NoGrammar(Exception):
    """llguidance cannot make a grammar."""


class Grammars:
    """Makes grammars for a tokenizer and caches the latest. One thread at a time may use it.

    Args:
        tokenizer: a tokenizer of transformers.
        vocab_size: the number of the model's scores.
        ends: the tokens of which one follows a whole text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Collection[int]) -> None:
        self.size, self.ends = vocab_size, frozenset(ends)
        self.tokenizer = _described(tokenizer, vocab_size, sorted(self.ends))
        self._matcher = lru_cache(_KEPT)(self._made)
        self._added = tuple(tokenizer.get_added_vocab())

    def of(self, *rules: str | Mapping[str, Any], start: str = "@r0", thinking: Thinking = None) -> JsonGrammar:
        """The grammar of texts.

        Args:
            rules: JSON schemas, or texts in llguidance's form of Lark; ``start`` calls them ``@r0``, ``@r1`` and so on.
            start: how they make up a text, in Lark's form.
            thinking: what may stand before that text.

        Raises:
            NoGrammar: llguidance cannot follow one of them; the message says why.
        """
        parts = [_part(number, rule) for number, rule in enumerate(rules)]
        if thinking is not None:
            start = f"thought answer\nanswer: {start}\n{thinking_grammar(thinking, self._added)}"
        if start != "@r0":
            parts.insert(0, {"lark_grammar": f"start: {start}"})
        grammar = json.dumps({"grammars": parts})
        if len(grammar) > _MAX_BYTES:
            raise NoGrammar(f"it has {len(grammar)} bytes, and the most is {_MAX_BYTES}")
        return JsonGrammar(self._matcher(grammar), self.size, self.ends)

    def problem(self, schema: Mapping[str, Any]) -> str | None:
        """Why no grammar can be made of a schema; None where it can."""
        try:
            self._made(json.dumps({"grammars": [_part(0, schema)]}))
        except NoGrammar as error:
            return str(error)
        return None

    def _made(self, grammar: str) -> LLMatcher:
        try:
            matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_limits())
        except BaseException as error:  # a panic of the library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise NoGrammar(_told(str(error))) from None
        if not matcher.is_error():
            begun = matcher.deep_copy()
            begun.compute_bitmask()
            if not begun.is_error():
                return matcher
            raise NoGrammar("no text fits it")
        raise NoGrammar(_told(matcher.get_error()))


def _part(number: int, rule: str | Mapping[str, Any]) -> dict[str, Any]:
    """One of a grammar's rules; options within a client's schema, of which one ignores keywords, are nothing."""
    own = {"lark_grammar": rule} if isinstance(rule, str) else {"json_schema": {**rule, "x-guidance": _OPTIONS}}
    return {"name": f"r{number}", **own}


def _told(message: str) -> str:
    """A message of llguidance in one line: the last one where the first one only shows the pattern."""
    if "coerce_one_of" in message:
        return "an answer could fit two of the schemas in oneOf, or it is not seen that none does"
    lines = [line.strip() for line in message.split("<state>")[0].splitlines() if line.strip()] or ["no reason given"]
    line = lines[-1].removeprefix("error: ") if lines[0].endswith(":") else lines[0]
    return line if len(line) <= 200 else f"{line[:197]}..."


class JsonGrammar:
    """A compiled grammar.

    Attributes:
        ends: the tokens of which one follows a whole text.
    """

    def __init__(self, matcher: LLMatcher, size: int, ends: frozenset[int]) -> None:
        self._matcher, self._size, self.ends = matcher, size, ends

    def start(self, prompt: Sequence[int]) -> JsonState:
        return JsonState(self._matcher.deep_copy(), self._size, self.ends)


class JsonState:
    """The state of one text under a grammar; the mask is computed when it is asked for."""

    def __init__(self, matcher: LLMatcher, size: int, ends: frozenset[int]) -> None:
        self._matcher, self._size, self._ends = matcher, size, ends
        self._forbidden: torch.Tensor | None = None

    def advance(self, token: int) -> JsonState | Ended | None:
        if token in self._ends:
            return Ended(self._ends) if self._matcher.is_accepting() else None
        other = self._matcher.deep_copy()
        taken = other.try_consume_tokens([token])
        _check(other)
        return JsonState(other, self._size, self._ends) if taken else None

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        if self._forbidden is None:
            self._forbidden = self._computed()
        return scores.masked_fill(self._forbidden.to(scores.device), -math.inf)

    def _computed(self) -> torch.Tensor:
        """[V] whether each token may not follow."""
        bits = self._matcher.compute_bitmask()
        _check(self._matcher)
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[: self._size].astype(np.bool_)
        allowed[list(self._ends)] = self._matcher.is_accepting()
        return torch.from_numpy(~allowed)


def _check(matcher: LLMatcher) -> None:
    """Raises ApiError for a matcher that has exceeded its limits, or that nothing can complete."""
    if not matcher.is_error():
        return
    if matcher.stop_reason().startswith("NoExtension"):
        raise ApiError(
            "nothing that goes on from here fits the form of this answer; change its schema", code="no_answer"
        )
    raise ApiError(
        f"the grammar of this answer became too complex while it was written: {_told(matcher.get_error())}; make the "
        "schema or pattern simpler, or bound its lengths",
        code="grammar_too_complex",
    )


def _described(tokenizer: Any, vocab_size: int, ends: list[int]) -> LLTokenizer:
    """The tokenizer as llguidance takes it.

    Raises:
        ApiError: it has no such form.
    """
    try:
        return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=ends)
    except (ValueError, TypeError) as error:
        raise ApiError(
            f"structured output needs a tokenizer of the tokenizers library, and this model's is none: "
            f"{first_line(error)}; leave the field out, or use another model",
            code="unsupported_parameter",
        ) from None
