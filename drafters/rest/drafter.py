"""REST (He et al. 2023, arXiv 2311.08252): retrieve what followed the text's end in a datastore.

The longest suffix of the text that occurs in the datastore gives its continuations; their most frequent prefixes are
the tree. Unlike the paper's code, sampling is lossless: the tree was chosen, so the target's own token decides.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy.typing as npt

from drafters.rest.datastore import Datastore, opened
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError, shown
from specdec.settings.parsing import check_positive
from specdec.step.tree import Draft, DraftBuilder, Hints
from specdec.target import Target

__all__ = ["Rest", "RestConfig", "frequent_prefixes"]

_MOST = 65_536  # occurrences that are read in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class RestConfig:
    """Options.

    Attributes:
        datastore: folder that ``specdec datastore build`` made with the target's tokenizer; it has no default.
        max_suffix, min_suffix: lengths of the suffix that is looked up.
        matches: most occurrences that are read, spread evenly over all, up to 65,536; the paper has 5000.
        tokens: tokens read after each.
        rows: rows below the root; None takes as many as pay, up to the paper's 64.
    """

    datastore: str | None = None
    max_suffix: int = 16
    min_suffix: int = 2
    matches: int = 500
    tokens: int = 10
    rows: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_suffix <= self.max_suffix:
            raise ConfigError(
                f"rest.min_suffix is {shown(self.min_suffix)} and max_suffix {shown(self.max_suffix)}; "
                "they must satisfy 1 <= min_suffix <= max_suffix"
            )
        check_positive("rest.", most=_MOST, matches=self.matches)
        check_positive("rest.", tokens=self.tokens, rows=self.rows)


class Rest(DrafterBase):
    """An open datastore."""

    name = "rest"
    draws = False
    Config = RestConfig
    needs_observe = False
    fixed_cost_rows = 4  # a search touches some hundred places of files that no cache holds

    def __init__(self, config: RestConfig, datastore: Datastore) -> None:
        super().__init__(config)
        self.datastore = datastore

    @classmethod
    def build(cls, config: RestConfig, target: Target) -> Rest:
        """Open the datastore.

        Raises:
            ConfigError: none was named.
            CheckpointError: no datastore there, a broken one, or one of another vocabulary.
        """
        if config.datastore is None:
            raise ConfigError(
                "rest.datastore is not set; make one with `specdec datastore build SOURCE --out FOLDER` and give FOLDER"
            )
        return cls(config, opened(config.datastore).check(target))

    def start(self, context: Context) -> RestSession:
        return RestSession(self.config, self.datastore, context)


class RestSession:
    def __init__(self, config: RestConfig, datastore: Datastore, context: Context) -> None:
        self._config = config
        self._datastore = datastore
        self._context = context
        self._rows = config.rows or context.costs.tree_rows(context.prompt_length, 64)
        self._found, self._seen = config.max_suffix, 0  # the longest suffix of the text when it had so many tokens

    def propose(self, row_budget: int) -> Draft:
        config, context = self._config, self._context
        size, count = min(config.tokens, context.remaining - 1, row_budget - 1), min(self._rows, row_budget - 1)
        if size < 1 or count < 1:
            return Draft.chain([context.root])
        builder = DraftBuilder(context.root)
        # What is found now was found before, less the tokens that are new.
        longest = min(config.max_suffix, self._found + len(context.tokens) - self._seen)
        length, places = self._datastore.longest_suffix(context.tokens[-longest:], config.min_suffix)
        self._found, self._seen = max(length, config.min_suffix - 1), len(context.tokens)
        if length:
            continuations = self._datastore.continuations(places, length, size, config.matches)
            rows = [0]
            for parent, token in frequent_prefixes(continuations, count):
                rows.append(builder.add(rows[parent], token))
        return builder.build(hints=Hints(match_length=length))

    def observe(self, seen: Observation) -> None:
        pass  # the text is read from the context


def frequent_prefixes(table: npt.NDArray[Any], count: int) -> list[tuple[int, int]]:
    """The ``count`` > 0 most frequent prefixes of the rows of ``table`` [M, L] as a trie: (parent, token) each.

    They are sorted, -1 ends a row. Parent 0 is the root, entry i is node i + 1. Of equally frequent prefixes the
    shorter one comes first, then the smaller one, so parents come before their children.

    Example: ``[[5, 6], [5, 6], [5, 9]]`` and 2 give ``[(0, 5), (1, 6)]``.
    """
    ahead: list[tuple[int, int, int, int, int]] = []  # (-rows, depth, first row, parent, token)

    def unfold(parent: int, first: int, last: int, depth: int) -> None:
        """Put the tokens of a column's rows [first, last) ahead."""
        for token, group in groupby(table[first:last, depth].tolist() if depth < table.shape[1] else ()):
            rows = len(list(group))
            if token >= 0:
                heapq.heappush(ahead, (-rows, depth, first, parent, token))
            first += rows

    chosen: list[tuple[int, int]] = []
    unfold(0, 0, len(table), 0)
    while ahead and len(chosen) < count:
        rows, depth, first, parent, token = heapq.heappop(ahead)
        chosen.append((parent, token))
        unfold(len(chosen), first, first - rows, depth + 1)
    return chosen
