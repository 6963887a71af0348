"""Token recycling (Luo et al. 2024, arXiv 2408.08696): the target's likeliest tokens of earlier steps are the draft.

For every verified row, accepted or not, the k likeliest successors are stored under the row's token. The next draft
walks these lists from the root along a fixed template of rank paths. It needs no training and no text to copy from.
When sampling, :mod:`drafters.token_recycling.recycled` ranks the stored tokens with the target's noise instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from drafters.shared.scored_tree import ScoredTree
from drafters.token_recycling.recycled import KEPT, Distributions, DrawnSession
from specdec.costs.prices import Prices
from specdec.drafter import Context, DrafterBase, Observation
from specdec.settings.parsing import check_positive
from specdec.step.step_output import StepOutput
from specdec.step.tree import Draft

__all__ = ["Successors", "TokenRecycling", "TokenRecyclingConfig", "template"]

# How often the token of each rank proves right, roughly: FIRST at rank 0, falling as a power of the rank.
_FIRST, _FALL = 0.5, 1.3
_MOST = 80  # rows of the paper's tree


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecyclingConfig:
    """Options.

    Attributes:
        rows: rows below the root; None takes as many as pay, up to the paper's 80.
        depth: longest path of the template.
        successors: k, successors stored per token; when sampling, 32 are stored with their scores.
        from_prompt: start with the prompt's pairs of tokens; if False, the first steps have nothing to propose.
        persistent: sequences share one table, so that a text starts with a full one; drafts then depend on earlier
            texts. Where the text depends on the proposed rows, as under ``reject``, each sequence has its own table.
    """

    rows: int | None = None
    depth: int = 6
    successors: int = 8
    from_prompt: bool = True
    persistent: bool = False

    def __post_init__(self) -> None:
        check_positive("token_recycling.", rows=self.rows, depth=self.depth, successors=self.successors)


class TokenRecycling(DrafterBase):
    """The options, and the shared table where sequences share one."""

    name = "token_recycling"
    draws = False
    Config = TokenRecyclingConfig
    needs_draft = False
    fixed_cost_rows = 1  # the best tokens of every row

    def __init__(self, config: TokenRecyclingConfig | None = None) -> None:
        super().__init__(config)
        self.top_k = max(self.config.successors, KEPT)
        self._shared: Successors | None = None
        self._drawn: Distributions | None = None

    def start(self, context: Context) -> TokenRecyclingSession | DrawnSession:
        options: TokenRecyclingConfig = self.config
        shares = options.persistent and not context.isolated
        if context.sampling.temperature > 0 and context.sampling.acceptance in ("auto", "match"):
            drawn = Distributions()
            if shares:
                drawn = self._drawn = self._drawn or drawn
            if options.from_prompt:
                drawn.read(context.tokens)
            return DrawnSession(options.rows, options.depth, drawn, context)
        kept = min(options.successors, context.max_rows)  # more would not be proposed
        table = Successors(kept)
        if shares:
            table = self._shared = self._shared or table
        if options.from_prompt:
            table.read(context.tokens)
        tree = template(min(options.rows or _MOST, context.max_rows), min(options.depth, context.max_rows), kept)
        size = len(tree) - 1
        if options.rows is None:
            size = Prices(context.costs).fastest(tree.reach[1:], context.prompt_length)
        return TokenRecyclingSession(tree, size, table, context)


@lru_cache(16)
def template(rows: int, depth: int, ranks: int) -> ScoredTree:
    """The ``rows`` nodes that are likeliest to be right, each with its rank as its token."""
    tree, guesses = ScoredTree(), [(rank, _FIRST / (rank + 1) ** _FALL) for rank in range(ranks)]
    tree.grow(lambda _: guesses, rows, depth)
    return tree


class Successors:
    """Token -> its likeliest successors when last seen, best first: the filled rows of the paper's V x k matrix."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._of: dict[int, Sequence[int]] = {}

    def of(self, token: int) -> Sequence[int]:
        """At most k distinct tokens; none where the token was never verified."""
        return self._of.get(token, ())

    def read(self, tokens: Sequence[int]) -> None:
        """Put the pairs of a text in, the latest ones foremost."""
        for token, after in pairwise(tokens):
            others = [known for known in self.of(token) if known != after]
            self._of[token] = [after, *others[: self._size - 1]]

    def learn(self, draft: Draft, path: Sequence[int], scores: StepOutput) -> None:
        """Take the top k of every scored row; where a token stands in several rows, an accepted one counts."""
        best, tokens = scores.top_k(self._size), draft.tokens
        scored = tokens if scores.rows is None else [tokens[row] for row in scores.rows]
        self._of.update(zip(scored, best, strict=True))
        self._of.update([(tokens[row], best[scores.place(row)]) for row in path])


class TokenRecyclingSession:
    def __init__(self, tree: ScoredTree, size: int, table: Successors, context: Context) -> None:
        self._nodes = [*zip(tree.parents, tree.tokens, strict=True)][1 : 1 + size]  # parents and ranks
        self._table = table
        self._context = context
        self._learns = True

    def propose(self, row_budget: int) -> Draft:
        self._learns = row_budget > 1  # a plain step needs no successors, and taking them would be most of its time
        root, deepest = self._context.root, self._context.remaining - 1
        if not self._table.of(root):
            return Draft.chain([root])
        tokens, parents, depths, of = [root], [-1], [0], self._table.of
        rows = [0]  # of the root and the template's nodes; -1: without a known token
        for above, rank in self._nodes:
            row, size = rows[above], len(tokens)
            if size >= row_budget:
                break
            known = of(tokens[row]) if row >= 0 and depths[row] < deepest else ()
            if rank >= len(known):
                rows.append(-1)
                continue
            rows.append(size)
            tokens.append(known[rank])
            parents.append(row)
            depths.append(depths[row] + 1)
        return Draft(tokens, parents)

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        assert seen.scores is not None
        if self._learns:
            self._table.learn(seen.draft, seen.path, seen.scores)
