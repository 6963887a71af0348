"""The cache of a drafter that runs its own model: keys and values of the text, and behind them rows of the draft.

A target's cache follows the text by itself, as the engine commits accepted rows. A drafter must maintain its own cache,
and always has the same three tasks. :class:`OwnCache` does them:

1. *Text that the cache lacks.* The cache has the accepted rows that the drafter has run, but not others: the bonus
   token, leaves of a draft, another drafter's rows, and tokens of steps in which the session rested. These run before
   the next draft, in a chain that ends in the root. A drafter that reads tokens finds them by ``lacking``; one that
   reads the target's hidden states (``taps``) keeps those with ``defer`` in ``observe`` and gets them back from
   ``catch_up``. ``text_rows`` are the chain's rows, and ``read_text`` is called after its pass.
2. *Rows of the draft.* The root is row 0 of the round, behind the text, and stays a scratch row until the step is
   verified. ``draft_rows`` puts further rows of the draft into scratch slots: a level of a tree at a time, or the
   next token of a chain. Only rows with guesses behind them have to run, so indices differ: ``rows`` has the draft's
   index for each row of the round.
3. *Rows that became text.* ``commit`` finds them by the emitted tokens, whichever drafter proposed them, moves them
   behind the text, and drops all others. So neither full acceptance nor a rejected tree is a special case; any row
   that is missing is text that the cache lacks, see 1.

Between steps, the cache's rows and the deferred rows together are as many as the text has tokens before the root, less
those that were missed in a rest (``miss``). That also holds where a token's row reads the hidden state of the token
before it (EAGLE, MTP): the last deferred state then belongs to the root's row, and ``catch_up`` gets no ``newest``.

Example: a drafter that reads the target's hidden states for rows that it proposes itself, as Kangaroo does::

    def passes(self, row_budget):
        own.begin()
        hidden = own.catch_up(root_hidden)  # [T, D]
        rows = own.text_rows(range(len(hidden)))
        logits = yield Pass(run, (hidden, rows))
        own.read_text(rows)
        ...  # tokens and parents of the draft, and the rows among them that are guessed behind
            logits = yield Pass(run, (hidden_of(rows), own.draft_rows(rows, parents)))

    def observe(self, seen):
        known = own.commit(seen, tokens)
        own.defer(seen.taps[layer], seen.path[len(known):])

Where rows of a draft run on guessed hidden states (EAGLE, MTP), their keys and values differ from those of the text.
Then ``commit(seen, tokens, most=1)`` keeps only the root's row, and all hidden states of the path are deferred. Where
one pass over masked rows makes the draft (DFlash), ``most=0`` keeps none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from specdec.decoder.spec import Layer
from specdec.drafter import Observation
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.step_io import ALL, StepInput, Wanted

__all__ = ["Nodes", "OwnCache", "specs_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """A sequence's input to a pass of a head: the next rows of its text, or of the tree or the block behind it.

    Attributes:
        step: T tokens in the head's own cache; each is paired with the hidden state of the position before it. The
            tokens of text before a block are not read.
        features: [T', taps x D] hidden states of the target for the first T' rows.
        states: [T - T', W] hidden states of its own for the other rows; None where these read none.
        asked: number of last rows whose logits are computed; of a block its drafted rows always are.
    """

    step: StepInput
    features: torch.Tensor | None = None
    states: torch.Tensor | None = None
    asked: int = 1


def specs_of(layers: Iterable[Layer], device: torch.device, dtype: torch.dtype) -> list[LayerSpec]:
    """What each layer caches."""
    every = [own.attention for own in layers]
    return [LayerSpec(own.kv_heads, own.head_dim, own.head_dim, own.window, device, dtype) for own in every]


class OwnCache:
    """Keys and values of one sequence in a drafter's own layers.

    Args:
        cache: an empty cache with room for the text and the rows of a round.

    Attributes:
        rows: the draft's index of each row of the round; the first is the root, 0.
        parents: the parent of each row of the round, as an index of the round; -1 for the root.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._deferred: list[torch.Tensor] = []
        self.begin()

    def begin(self) -> None:
        """Begin a round, in which no row of the draft has run."""
        self.rows: list[int] = []
        self.parents: list[int] = []
        self._depths: list[int] = []
        self._place: dict[int, int] = {}  # row of the draft -> row of the round
        self._is_chain = True

    def lacking(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The next tokens of the text that the cache lacks, at most ``most``."""
        length = self.cache.length
        return tokens[length : length + most]

    def defer(self, hidden: torch.Tensor, rows: Sequence[int] | None = None) -> None:
        """Keep hidden states [T, D] of text that the cache lacks (only ``rows``, if given) until ``catch_up``."""
        parts = [hidden] if rows is None else [hidden[row : row + 1] for row in rows]
        self._deferred += parts

    def miss(self) -> None:
        """Forget what waits, as text ran behind it whose hidden states are not known.

        The cache goes on without that text: its rows see less, and no more is lost than guesses.
        """
        self._deferred.clear()
        self.begin()

    def catch_up(self, *newest: torch.Tensor) -> torch.Tensor:
        """[T, D] the deferred hidden states, which are then dropped, and behind them the ``newest``."""
        hidden = [*self._deferred, *newest]
        self._deferred.clear()
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def text_rows(self, tokens: Sequence[int], wanted: Wanted = ALL) -> StepInput:
        """Rows of text behind the cache's text; ``range(T)`` serves where their tokens are not read."""
        return StepInput.of(self.cache, tokens, wanted=wanted)

    def read_text(self, step: StepInput, *, root: bool = True) -> None:
        """Commit rows of text after their pass; not the last one, the round's root, if ``root`` is set."""
        self.cache.commit(range(step.rows - root))
        if root:
            self._append(0, -1)

    def root_ran(self, rows: int) -> None:
        """Commit ``rows`` rows of text that the library has run, all but the root's, which begins the draft."""
        self.cache.commit(range(rows - 1))
        self._append(0, -1)

    def draft_rows(
        self, rows: Sequence[int], parents: Sequence[int], tokens: Sequence[int] | torch.Tensor | None = None
    ) -> StepInput:
        """Further rows of the draft, behind the rows that have run.

        Args:
            rows: the draft's indices of these rows; each row's parent is in the round.
            parents: the parents of all rows of the draft.
            tokens: the rows' tokens; None where they are not read.
        """
        first = len(self.rows)
        for row in rows:
            self._append(row, self._place[parents[row]])
        tree = None if self._is_chain else (self.parents, self._depths)
        return StepInput.of(self.cache, rows if tokens is None else tokens, tree, first=first)

    def _append(self, row: int, parent: int) -> None:
        own = len(self.rows)
        self._is_chain = self._is_chain and parent == own - 1
        self._place[row] = own
        self.rows.append(row)
        self.parents.append(parent)
        self._depths.append(self._depths[parent] + 1 if own else 0)

    def commit(self, seen: Observation, tokens: Sequence[int], *, most: int | None = None) -> list[int]:
        """Commit the rows of the round that became text, and end the round.

        Args:
            seen: the observation of the step.
            tokens: the tokens of this round's draft, for the indices in ``rows``.
            most: most rows to commit, those whose keys and values equal the text's; None for all.

        Returns:
            The rows of the round that were committed, the root first, along the accepted path.
        """
        path = list[int]()
        if self.rows and seen.draft is not None:
            path = [0, *self._below_root(seen.tokens[:-1], tokens)][:most]
        self.cache.commit(path)
        self.begin()
        return path

    def _below_root(self, emitted: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """The path of rows below the root that has these tokens, as far as it exists."""
        path, above = list[int](), 0
        for token in emitted:
            below = range(above + 1, len(self.rows))
            matching = (own for own in below if self.parents[own] == above and tokens[self.rows[own]] == token)
            if (own := next(matching, None)) is None:
                break
            path.append(own)
            above = own
        return path
