"""REST (He et al. 2023, arXiv 2311.08252): propose what followed the text's last tokens in a datastore.

The longest suffix of the text in the datastore gives continuations, and their most frequent prefixes form the tree.
Unlike in the paper's code, sampling is lossless: the tree was not drawn from a q, so the target's own token decides.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy.typing as npt

from drafters.rest.datastore import Datastore, opened
from specdec.costs.curve import CostCurve
from specdec.costs.prices import Prices
from specdec.drafter import Context, DrafterBase, Observation
from specdec.errors import ConfigError, shown
from specdec.settings.parsing import check_positive
from specdec.step.tree import Draft, DraftBuilder, Hints
from specdec.target import Target

__all__ = ["Rest", "RestConfig", "frequent_prefixes", "rows_for"]

_MOST = 65_536  # bound of the occurrences that are read in a step
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RestConfig:
    """Options.

    Attributes:
        datastore: folder that ``specdec datastore build`` wrote with the target's tokenizer; there is no default.
        max_suffix, min_suffix: bounds of the length of the suffix that is searched for.
        matches: most occurrences to read, spread evenly over all, up to 65,536; the paper reads 5000.
        tokens: number of tokens to read behind each occurrence.
        rows: rows below the root; None for as many as pay, up to the paper's 64.
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
    fixed_cost_rows = 4  # a search reads about a hundred places of files that are in no cache

    def __init__(self, config: RestConfig, datastore: Datastore) -> None:
        super().__init__(config)
        self.datastore = datastore

    @classmethod
    def build(cls, config: RestConfig, target: Target) -> Rest:
        """Open the datastore.

        Raises:
            ConfigError: no datastore is named.
            CheckpointError: there is no datastore, or a broken one, or one of another vocabulary.
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
        self._rows = config.rows or rows_for(context.costs, context.prompt_length)
        self._found, self._seen = config.max_suffix, 0  # the longest suffix found, and the text's length then

    def propose(self, row_budget: int) -> Draft:
        config, context = self._config, self._context
        size, count = min(config.tokens, context.remaining - 1, row_budget - 1), min(self._rows, row_budget - 1)
        if size < 1 or count < 1:
            return Draft.chain([context.root])
        builder = DraftBuilder(context.root)
        # A suffix that is found now was found before, without the tokens that are new since.
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


def rows_for(costs: CostCurve, length: int) -> int:
    """The number of rows below the root, up to 64, with the most expected tokens per second after ``length`` tokens.

    It assumes that the k-th best row is accepted with probability 1 / (k + 1).
    """
    return Prices(costs).fastest([1 / (row + 1) for row in range(1, _MOST_ROWS + 1)], length)


def frequent_prefixes(table: npt.NDArray[Any], count: int) -> list[tuple[int, int]]:
    """The ``count`` > 0 most frequent prefixes of rows of ``table`` [M, L], as a trie of (parent, token) entries.

    The rows are sorted, and -1 ends a row. Parent 0 is the root, and entry i is node i + 1. Of equally frequent
    prefixes the shorter comes first, then the smaller, so parents precede their children.

    Example: ``[[5, 6], [5, 6], [5, 9]]`` and 2 give ``[(0, 5), (1, 6)]``.
    """
    ahead: list[tuple[int, int, int, int, int]] = []  # (-rows, depth, first row, parent, token)

    def unfold(parent: int, first: int, last: int, depth: int) -> None:
        """Push the tokens of a column's rows [first, last) on the heap."""
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
