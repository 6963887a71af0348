"""Prompt lookup: propose what followed the last time that the text had the same end.

Saxena 2023, "Prompt Lookup Decoding"; transformers' ``prompt_lookup_num_tokens`` is the same idea with ``max_ngram=2,
match="leftmost", overlap=False``. N-grams are indexed as tokens arrive, so a lookup costs the same at any context
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError, shown
from specdec.settings.parsing import check_positive
from specdec.step.tree import Draft, DraftBuilder, Hints

__all__ = ["PromptLookup", "PromptLookupConfig"]

_LONGEST = 128  # longest n-gram; every token of the text adds one n-gram of each length to the index


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLookupConfig:
    """Options.

    Attributes:
        max_ngram, min_ngram: lengths of the suffix to look up, the longest first; at most 128.
        tokens: most tokens to propose from one match.
        match: ``rightmost`` (latest) or ``leftmost`` (earliest) occurrence.
        matches: how many occurrences to propose, as a trie.
        overlap: whether a match that reaches the end of the text continues with the proposal itself, so that a
            repeating text is continued for as long as asked.
    """

    max_ngram: int = 3
    min_ngram: int = 1
    tokens: int = 8
    match: str = "rightmost"
    matches: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(
                f"prompt_lookup.min_ngram is {shown(self.min_ngram)} and max_ngram {shown(self.max_ngram)}; "
                "they must satisfy 1 <= min_ngram <= max_ngram"
            )
        check_positive("prompt_lookup.", most=_LONGEST, max_ngram=self.max_ngram)
        check_positive("prompt_lookup.", tokens=self.tokens, matches=self.matches)
        if self.match not in ("leftmost", "rightmost"):
            raise ConfigError(f"prompt_lookup.match is {self.match!r}; it must be leftmost or rightmost")


class PromptLookup(DrafterBase):
    """Copies from the text so far."""

    name = "prompt_lookup"
    draws = False
    Config = PromptLookupConfig
    needs_observe = False

    def start(self, context: Context) -> PromptLookupSession:
        return PromptLookupSession(self.config, context)


class PromptLookupSession:
    def __init__(self, config: PromptLookupConfig, context: Context) -> None:
        self._config = config
        self._context = context
        # n-gram -> positions behind its occurrences, ascending
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def propose(self, row_budget: int) -> Draft:
        config, context = self._config, self._context
        if row_budget < 2:
            return Draft.chain([context.root])
        self._index()
        size = min(config.tokens, context.remaining - 1, row_budget - 1)
        length, starts = self._matches()
        if len(starts) <= 1:
            path = self._continuation(starts[0], size) if starts else []
            return Draft.chain([context.root, *path], hints=Hints(match_length=length))
        builder = DraftBuilder(context.root)
        for start in starts:
            builder.add_path(self._continuation(start, size), row_budget=row_budget)
        return builder.build(hints=Hints(match_length=length))

    def observe(self, seen: Observation) -> None:
        pass  # the text is read from the context

    def _index(self) -> None:
        """Index the n-grams that end before the last token; the text's own suffix is not an earlier occurrence."""
        tokens, config = self._context.tokens, self._config
        for end in range(max(self._indexed, 1), len(tokens)):
            for size in range(config.min_ngram, min(config.max_ngram, end) + 1):
                self._after.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._indexed = len(tokens)

    def _matches(self) -> tuple[int, Sequence[int]]:
        """The length of the longest suffix in the index, and the positions behind it, preferred ones first."""
        tokens, config = self._context.tokens, self._config
        for size in range(min(config.max_ngram, len(tokens)), config.min_ngram - 1, -1):
            ends = self._after.get(tuple(tokens[-size:]))
            if ends:
                most = min(config.matches, self._context.max_rows)
                return size, ends[: -most - 1 : -1] if config.match == "rightmost" else ends[:most]
        return 0, ()

    def _continuation(self, start: int, size: int) -> list[int]:
        tokens = self._context.tokens
        path = tokens[start : start + size]
        period = len(tokens) - start
        while self._config.overlap and len(path) < size:
            path.append(path[len(path) - period])
        return path
