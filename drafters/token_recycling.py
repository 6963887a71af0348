"""Token recycling (Luo et al. 2024, arXiv 2408.08696): what the target thought of last time is the next draft.

Every verified row, accepted or not, leaves its k likeliest successors behind under its own token. The next draft walks
these lists from the root along a fixed template of rank paths. It needs no training and no text to copy from.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from specdec.config import check_positive
from specdec.draft import Draft
from specdec.drafter import Context, DrafterBase, Observation, Question
from specdec.sampling import Scores

__all__ = ["Successors", "TokenRecycling", "TokenRecyclingConfig", "template"]

# How often the token of each rank proves right, roughly: FIRST at rank 0, falling as a power of the rank.
_FIRST, _FALL = 0.5, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecyclingConfig:
    """Options.

    Attributes:
        rows: rows below the root; None takes as many as pay, up to the paper's 80.
        depth: longest path of the template.
        successors: k, tokens kept per token.
        from_prompt: start from the prompt's own pairs of tokens; off, the first steps have nothing to propose.
        persistent: sequences share one table, so that it starts warm; then drafts depend on what was decoded before
            (the text does not).
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
    Config = TokenRecyclingConfig
    fixed_cost_rows = 1  # the best tokens of every row

    def __init__(self, config: TokenRecyclingConfig | None = None) -> None:
        super().__init__(config)
        self._shared = Successors(self.config.successors)

    def start(self, context: Context) -> TokenRecyclingSession:
        options: TokenRecyclingConfig = self.config
        table = self._shared if options.persistent else Successors(options.successors)
        if options.from_prompt:
            table.read(context.tokens)
        rows = options.rows or context.costs.tree_rows(context.prompt_length, 80)
        return TokenRecyclingSession(template(rows, options.depth, options.successors), table, context)


def template(rows: int, depth: int, ranks: int) -> list[tuple[int, int]]:
    """The ``rows`` nodes that are likeliest to be right, as (parent, rank); parent 0 is the root, node i is i + 1.

    A node's worth is the product of its ranks' rates. In descending order of worth, parents come first.

    Example: ``template(3, 6, 8)`` is ``[(0, 0), (1, 0), (0, 1)]``: the best guess, the best after it, the second best.
    """
    rates = [_FIRST / (rank + 1) ** _FALL for rank in range(ranks)]
    nodes: list[tuple[int, int]] = []
    # (-worth, order of discovery, parent, rank, depth)
    ahead = [(-rate, rank, 0, rank, 1) for rank, rate in enumerate(rates)]
    heapq.heapify(ahead)
    found = ranks
    while ahead and len(nodes) < rows:
        worth, _, parent, rank, level = heapq.heappop(ahead)
        nodes.append((parent, rank))
        if level < depth:
            for below, rate in enumerate(rates):
                heapq.heappush(ahead, (worth * rate, found, len(nodes), below, level + 1))
                found += 1
    return nodes


class Successors:
    """Token -> its likeliest successors when last seen, best first: the filled rows of the paper's V x k matrix."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._of: dict[int, list[int]] = {}

    def of(self, token: int) -> Sequence[int]:
        """At most k distinct tokens; none where the token was never verified."""
        return self._of.get(token, ())

    def read(self, tokens: Sequence[int]) -> None:
        """Put the pairs of a text in, the latest ones foremost."""
        for token, after in pairwise(tokens):
            known = self._of.setdefault(token, [])
            if after in known:
                known.remove(after)
            known.insert(0, after)
            del known[self._size :]

    def best(self, scores: Scores) -> torch.Tensor:
        """[R, k] the likeliest tokens after every scored row."""
        return scores.logits.topk(min(self._size, scores.logits.shape[-1]), -1).indices

    def learn(self, draft: Draft, path: Sequence[int], scores: Scores, known: Sequence[int] | None = None) -> None:
        """Take the top k of every scored row; where a token stands in several rows, an accepted one counts.

        ``known``: what ``best`` says of them, row after row, where it was asked already.
        """
        if known is None:
            best: list[Sequence[int]] = self.best(scores).tolist()
        else:
            size = len(known) // len(scores.logits)
            best = [known[start : start + size] for start in range(0, len(known), size)]
        rows = scores.rows if scores.rows is not None else range(len(draft))
        for row, tokens in zip(rows, best, strict=True):
            self._of[draft.tokens[row]] = list(tokens)
        for row in path:
            self._of[draft.tokens[row]] = list(best[scores.place(row)])


class TokenRecyclingSession:
    def __init__(self, nodes: Sequence[tuple[int, int]], table: Successors, context: Context) -> None:
        self._nodes = nodes
        self._table = table
        self._context = context
        self._learns = True

    def propose(self, room: int) -> Draft:
        self._learns = room > 1  # where nobody asks, taking the best of every row would be most of its time
        deepest = self._context.remaining - 1
        tokens, parents, depths = [self._context.root], [-1], [0]
        row_of = {0: 0}  # node of the template -> row; nodes without a known token have none
        for node, (above, rank) in enumerate(self._nodes, 1):
            if len(tokens) >= room:
                break
            parent = row_of.get(above)
            if parent is None or depths[parent] >= deepest:
                continue
            known = self._table.of(tokens[parent])
            if rank < len(known):
                row_of[node] = len(tokens)
                tokens.append(known[rank])
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return Draft(tokens, parents)

    def ask(self, question: Question) -> torch.Tensor | None:
        return self._table.best(question.scores) if self._learns else None

    def observe(self, seen: Observation) -> None:
        assert seen.draft is not None
        assert seen.scores is not None
        if self._learns:
            self._table.learn(seen.draft, seen.path, seen.scores, seen.answer)
