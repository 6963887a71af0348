"""EAGLE (Li et al. 2024, arXiv 2401.15077 and 2406.16858; 2025, arXiv 2503.01840): a layer drafts token by token.

Row i of the head reads the target's hidden state of position i (in EAGLE-3, those of several layers) and the embedding
of token i + 1, and predicts the token behind that one. Where the target has not run yet, the head's own hidden state
stands in for the target's. A step begins with the rows of the tokens committed since the last step; the last of these
is the root's row. It goes on with rows of guessed tokens, level by level. A guess is extended if the chance that it is
reached pays for a pass, and verified if that pays for its row (EAGLE-2's tree, by measured costs). What the head
computed from its own states is discarded, as the target's states are there by the next step.

P-EAGLE (arXiv 2602.01469) drafts all depths at once, with masks in place of unknown tokens.

When sampling, tokens are ranked with the same noise that the target will draw with, see
:func:`drafters.shared.vocabulary.coupled`. Under ``reject``, a tree is drawn and carries its q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.heads.chain_step import ChainStep
from drafters.heads.growing import WIDTH, Behind, Tokens
from drafters.heads.growth import Growth
from drafters.heads.head_step import Guess
from drafters.heads.native_growth import Grown, NativeGrowth, Waiting, grow
from drafters.heads.options import HeadOptions
from drafters.heads.session import HeadDrafter
from drafters.heads.unread import UnreadSession, rows_at
from drafters.heads.weights import Chain, HeadWeights
from drafters.shared.own_cache import Nodes
from specdec.drafter import Context
from specdec.native.library import library
from specdec.step.forward_passes import Pass, Passes
from specdec.step.tree import Draft
from specdec.target import Target

__all__ = ["Eagle", "EagleConfig"]

_DEPTH = 6  # tokens below the root, by default


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadOptions):
    """Options.

    Attributes:
        head: folder of a trained EAGLE-1 to 3.1 or P-EAGLE head, in any format that `specdec drafters --check` knows;
            None takes the one in this package that was trained for the model.
        tokens: most depth of a draft; each level costs a pass of the head. None is 6, or the depth that a P-EAGLE head
            was published with.
        rows: most rows of a draft below the root; None for as many as pay.
        branch: most children of a row; 1 makes a chain.
        min_chance: extend and verify all rows that the head expects to be reached with at least this chance, within
            ``rows`` and ``tokens``, as the papers do with fixed sizes; None takes as many as pay by measured costs.
        check_target: whether to refuse a head that was trained for another model.
    """

    where: ClassVar[str] = "eagle."


class Eagle(HeadDrafter):
    """A trained EAGLE head, which drafts a chain or a tree."""

    name, trained = "eagle", "eagle3"
    Config = EagleConfig

    def __init__(self, config: EagleConfig, head: HeadWeights, target: Target) -> None:
        super().__init__(config, head, target)
        assert isinstance(head, Chain)
        self.step = ChainStep(head, self.vocabulary.head, target)
        self.at_once = head.config.at_once
        self.depth = config.tokens or head.config.depth or _DEPTH
        self.mask_token = head.config.mask_token

    @property
    def is_one_call(self) -> bool:
        """Whether a pass is one call, of the native library or of a recorded graph, and not many launches."""
        recorded = self.step.recorded
        return self.step.native is not None or (recorded is not None and recorded.failed is None)

    @staticmethod
    def may_be_one_call(target: Target) -> bool:
        """The same of a head that is not loaded yet; False where it cannot be."""
        if target.launches:
            return target.recording is not None
        return library() is not None

    def start(self, context: Context) -> EagleSession:
        return EagleSession(self, context)

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        levels = 0 if self.at_once else self.depth - 1  # that run behind the root
        width = min(WIDTH, self.config.branch, self.config.rows or rows, rows)
        self.step.warm_up(sequences, width if levels else 0, 1 + width * levels)

    def guess(self, brought: Sequence[Nodes]) -> list[Guess]:
        """Run the head for the rows of each sequence."""
        return self.step.guess(brought)

    def grow(self, several: Sequence[NativeGrowth]) -> list[Grown]:
        """Grow each sequence's draft."""
        assert self.step.native is not None
        return grow(self.step.native, several)


class EagleSession(UnreadSession):
    def __init__(self, drafter: Eagle, context: Context) -> None:
        step, config = drafter.step, drafter.config
        rows = WIDTH * drafter.depth + 1
        super().__init__(context, drafter, step.specs, step.weights, rows)
        self._drafter, self._step, self._config = drafter, step, config
        self._guess: Guess | None = None  # the latest level's result
        self._level: Sequence[int] = []
        native = step.native
        grows = native is not None and native.grows and not drafter.at_once
        self._stays = self._stays and native is None
        self._waits = Waiting(native) if native is not None and grows and self._plain and not self._draws else None

    def missed(self) -> None:
        super().missed()
        if self._waits is not None:
            self._waits.clear()

    def _grow(self, most: int, deepest: int) -> Passes[Draft]:
        if self._waits is None:
            return (yield from super()._grow(most, deepest))
        own, waits = self._own, self._waits
        features = waits.addresses()
        first, rows = self._next + 1, len(features) // len(self._taps)
        growth = self._growing(self._context.tokens[first : first + rows], features, most, deepest)
        grown: Grown = yield Pass(self._drafter.grow, growth)
        waits.clear()
        own.root_ran(rows)
        return self._draft_of(grown, grown.passes)

    def _defer(self, taps: Sequence[torch.Tensor], rows: Sequence[int] | None) -> None:
        if self._waits is None:
            super()._defer(taps, rows)
        else:
            self._waits.add(taps, range(len(taps[0])) if rows is None else rows)

    def _catch_up(self) -> None:
        if self._waits is not None:
            self._own.defer(self._waits.take())
        super()._catch_up()
        if self._waits is not None:
            self._waits.add_joined(self._own.catch_up())

    def _absorb(self, features: torch.Tensor) -> None:
        step = self._own.text_rows(self._tokens_of(features))
        self._step.guess([Nodes(step, features)])
        self._own.read_text(step, root=False)

    def _begin(self, deepest: int) -> Passes[None]:
        features, drafter = self._own.catch_up(), self._drafter
        tokens = self._tokens_of(features)
        if not drafter.at_once:  # the head reads the committed rows, the root's included
            step = self._own.text_rows(tokens)
            self._guess = guess = yield Pass(drafter.guess, Nodes(step, features))
            self._own.read_text(step)
            if self._stays:
                self._root = guess.rows.tokens[0, -1:]
            return
        masks, state = deepest - 1, self._step.mask_state  # behind the root's row; their keys and values are not kept
        assert state is not None
        step = self._own.text_rows([*tokens, *[drafter.mask_token] * masks])
        self._guess = guess = yield Pass(drafter.guess, Nodes(step, features, state.expand(masks, -1), asked=masks + 1))
        self._own.cache.commit(range(len(features)))
        if self._stays:
            self._root = guess.rows.tokens[0, len(features) - 1 : len(features)]

    def _behind(self, tree: Growth, level: Sequence[int], tokens: Tokens) -> Passes[Behind]:
        depth = tree.depths[level[0]]
        assert self._guess is not None
        if self._drafter.at_once:  # the distribution does not depend on the tokens above it
            return Behind(self._guess.logits[depth][None])
        if depth:
            states = rows_at(self._guess.states, [self._level.index(tree.parents[node]) for node in level])
            step = self._own.draft_rows(level, tree.parents, tokens)
            self._guess = yield Pass(self._drafter.guess, Nodes(step, states=states, asked=len(level)))
        self._level = level
        return Behind(self._guess.logits)
