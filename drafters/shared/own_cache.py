"""The cache of a drafter that runs a model of its own: keys and values of the text, and behind them the round's rows.

A target's cache follows the text by itself, as the engine commits what it accepts. A drafter's own cache has to be kept
up by the drafter, and in the same three places each time. :class:`OwnCache` is these places:

1. *Text that the cache lacks.* Accepted rows that the drafter has run are there, others are not: the bonus token,
   leaves of a draft, another drafter's rows, tokens of steps in which the session rested. They are run before the next
   draft, in a chain that ends in the root. A drafter that reads tokens finds them by ``lacking``; one that reads the
   target's hidden states (``taps``) keeps those by ``defer`` in ``observe`` and gets them back by ``catch_up``.
   ``text_block`` is the chain's block, and ``read_text`` is called when its pass is over.
2. *Rows of the draft.* The root is row 0 of the round, behind the text, and stays a scratch row until the step is
   verified. ``draft_block`` puts more of the draft's rows into scratch slots: a level of a tree at a time, or the next
   token of a chain. Only rows that the drafter guesses behind have to be run, so numbers differ: ``rows`` says which
   row of the draft each row of the round is.
3. *Rows that became text.* ``commit`` finds them by the tokens that were emitted, whoever proposed them, moves them
   behind the text, and forgets all others. So neither full acceptance nor a rejected tree is a special case, and what
   is not there is lacking, see 1.

Between steps the cache's rows and the deferred ones are together as many as the text has tokens before the root. That
holds as well where a row at a token reads the hidden state of the token before it (EAGLE, MTP): the last deferred one
is then that of the root's row, and ``catch_up`` gets no newest.

Example, a drafter that reads the target's hidden states of rows that it proposes itself, as Kangaroo does::

    def passes(self, row_budget):
        own.begin()
        hidden = own.catch_up(root_hidden)  # [T, D]
        block = own.text_block(range(len(hidden)))
        logits = yield Pass(run, (hidden, block))
        own.read_text(block)
        ...  # tokens and parents of the draft, and the rows among them that are guessed behind
            logits = yield Pass(run, (hidden_of(rows), own.draft_block(rows, parents)))

    def observe(self, seen):
        known = own.commit(seen, tokens)
        own.defer(seen.taps[layer], seen.path[len(known):])

Where rows of a draft are run on hidden states that are guesses (EAGLE, MTP), what they leave in the cache is not what
the text would leave: then ``commit(seen, tokens, most=1)`` keeps the root's row alone, and all hidden states of the
path are deferred. Where a draft comes of one pass over masked rows (DFlash), ``most=0`` keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.drafter import Observation
from specdec.step.block import Block
from specdec.step.cache import KVCache

__all__ = ["OwnCache"]


class OwnCache:
    """Keys and values of one sequence in a drafter's own layers.

    Args:
        cache: empty, with room for the text and for the rows of a round.
        device: where the drafter's rows are embedded; None where it builds no inputs from a block.
        backend: attention backend of the blocks, see :mod:`specdec.runners.attention`.

    Attributes:
        rows: of each row of the round which row of the draft it is; the root, 0, is the first.
        parents: of each row of the round its parent's place among them; -1 for the root.
    """

    def __init__(self, cache: KVCache, *, device: torch.device | None = None, backend: str = "auto") -> None:
        self.cache = cache
        self._device, self._backend = device, backend
        self._deferred: list[torch.Tensor] = []
        self.begin()

    def begin(self) -> None:
        """Begin a round: no row of its draft was run."""
        self.rows: list[int] = []
        self.parents: list[int] = []
        self._depths: list[int] = []
        self._place: dict[int, int] = {}  # row of the draft -> row of the round
        self._is_chain = True

    def lacking(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The next tokens of the text, at most so many, that the cache lacks."""
        length = self.cache.length
        return tokens[length : length + most]

    def defer(self, hidden: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        """Keep hidden states [T, D] of text that the cache lacks, all of them or some rows, until ``catch_up``."""
        parts = [hidden] if rows is None else [hidden[row : row + 1] for row in rows]
        self._deferred += parts

    def catch_up(self, *newest: torch.Tensor) -> torch.Tensor:
        """[T, D] the hidden states that were deferred, which are deferred no longer, and behind them the newest."""
        hidden = [*self._deferred, *newest]
        self._deferred.clear()
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def text_block(self, tokens: Sequence[int]) -> Block:
        """The block of text that follows the cache's; of ``range(T)`` where a block's tokens are not read."""
        return Block(self.cache, tokens, device=self._device, backend=self._backend)

    def read_text(self, block: Block, *, root: bool = True) -> None:
        """The pass of a block of text is over: commit its rows, but for the last one where it is the round's root."""
        self.cache.commit(range(block.rows - root))
        if root:
            self._append(0, -1)

    def draft_block(self, rows: Sequence[int], parents: Sequence[int], tokens: Sequence[int] | None = None) -> Block:
        """The block of more rows of the draft, behind those that were run.

        Args:
            rows: their numbers in the draft; each one's parent is among the round's rows.
            parents: of all the draft's rows.
            tokens: theirs; None where a block's tokens are not read.
        """
        first = len(self.rows)
        for row in rows:
            self._append(row, self._place[parents[row]])
        tree = (None, None) if self._is_chain else (self.parents, self._depths)
        return Block(
            self.cache,
            rows if tokens is None else tokens,
            parents=tree[0],
            depths=tree[1],
            first=first,
            device=self._device,
            backend=self._backend,
        )

    def _append(self, row: int, parent: int) -> None:
        own = len(self.rows)
        self._is_chain = self._is_chain and parent == own - 1
        self._place[row] = own
        self.rows.append(row)
        self.parents.append(parent)
        self._depths.append(self._depths[parent] + 1 if own else 0)

    def commit(self, seen: Observation, tokens: Sequence[int], *, most: int | None = None) -> list[int]:
        """Commit the round's rows that became text, and end the round.

        Args:
            seen: what became of the step.
            tokens: of the draft of this round, by the numbers in ``rows``.
            most: rows whose keys and values are those of the text; None for all.

        Returns:
            The rows of the round that were committed, the root first, down the accepted path.
        """
        path = list[int]()
        if self.rows and seen.draft is not None:
            path = [0, *self._below_root(seen.tokens[:-1], tokens)][:most]
        self.cache.commit(path)
        self.begin()
        return path

    def _below_root(self, emitted: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The rows below the root that hold these tokens, one behind the other, as far as there are any."""
        path, above = list[int](), 0
        for token in emitted:
            below = range(above + 1, len(self.rows))
            matching = (own for own in below if self.parents[own] == above and tokens[self.rows[own]] == token)
            if (own := next(matching, None)) is None:
                break
            path.append(own)
            above = own
        return path
