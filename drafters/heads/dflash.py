"""DFlash (arXiv 2602.06036), DFlash2 and DSpark: one pass over a block of masks drafts all its tokens.

A block is the last token with masks behind it. Its rows attend to the whole text, through keys and values computed from
the target's hidden states, and to each other. So one pass gives all tokens, and each one's distribution is the same
whatever tokens precede it. DSpark's bias and DFlash2's selector correct it for the token before, and DSpark's
confidence estimates acceptance. These chances grow a tree, as far as its rows pay. No row of a block is kept: accepted
tokens are seen through the target's hidden states.

When sampling, tokens are ranked with the same noise that the target will draw with. Under ``reject``, a tree is drawn
and carries its q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from drafters.heads.block_step import BlockStep
from drafters.heads.growing import Behind, Tokens
from drafters.heads.growth import Growth
from drafters.heads.head_step import Guess
from drafters.heads.native_growth import Grown, NativeGrowth, grow_block
from drafters.heads.options import HeadOptions
from drafters.heads.session import HeadDrafter
from drafters.heads.transitions import Transitions
from drafters.heads.unread import UnreadSession
from drafters.heads.weights import Block, HeadWeights
from drafters.shared.own_cache import Nodes
from specdec.drafter import Context
from specdec.native.types import CTransitions
from specdec.step.forward_passes import Pass, Passes
from specdec.step.tree import Draft
from specdec.target import Target

__all__ = ["DFlash", "DFlashConfig"]


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadOptions):
    """Options.

    Attributes:
        head: folder of a trained DFlash, DFlash2 or DSpark head, in any format that `specdec drafters --check` knows;
            None takes the one in this package that was trained for the model.
        tokens: most depth of a draft; None for the block's.
        rows: most rows of a draft below the root; None for as many as pay.
        branch: most children of a row; 1 makes a chain.
        min_chance: verify all rows that the head expects to be reached with at least this chance, within ``rows`` and
            ``tokens``; None verifies as many as pay by measured costs.
        check_target: whether to refuse a head that was trained for another model.
    """

    where: ClassVar[str] = "dflash."


class DFlash(HeadDrafter):
    """A trained DFlash, DFlash2 or DSpark head, which drafts a block of tokens in one pass."""

    name, trained = "dflash", "dspark"
    at_once = True
    Config = DFlashConfig

    def __init__(self, config: DFlashConfig, head: HeadWeights, target: Target) -> None:
        super().__init__(config, head, target)
        assert isinstance(head, Block)
        own = head.config
        self.depth = min(config.tokens or own.drafted, own.drafted)
        self.step = BlockStep(head, self.vocabulary.head, target, self.depth)
        self.transitions, native = Transitions(head), self.step.native
        self._described: CTransitions | None = None
        if native is not None and native.outputs is not None:
            self._described = self.transitions.described(native.outputs, native.dtype)

    def start(self, context: Context) -> DFlashSession:
        return DFlashSession(self, context)

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        self.step.warm_up(sequences)

    def guess(self, brought: Sequence[Nodes]) -> list[Guess]:
        """Run the block of each sequence."""
        return self.step.guess(brought)

    @property
    def grows(self) -> bool:
        """Whether the native library can grow drafts."""
        return self._described is not None

    def grow(self, several: Sequence[tuple[Nodes, NativeGrowth]]) -> list[Grown]:
        """Run the block of each sequence, and grow its draft."""
        assert self._described is not None
        guesses = self.step.guess([nodes for nodes, _ in several])
        return [
            grow_block(self._described, growth, guess.states, guess.logits)
            for (_, growth), guess in zip(several, guesses, strict=True)
        ]


class DFlashSession(UnreadSession):
    def __init__(self, drafter: DFlash, context: Context) -> None:
        step = drafter.step
        super().__init__(context, drafter, step.specs, step.weights, 2 * step.config.block_size)
        self._drafter, self._step = drafter, step
        self._guess: Guess | None = None
        self._states = dict[int, torch.Tensor]()  # states of a recurrent bias, by node
        self._grows = drafter.grows and self._plain and not self._draws
        self._stays = self._stays and step.native is None

    def _grow(self, most: int, deepest: int) -> Passes[Draft]:
        if not self._grows:
            return (yield from super()._grow(most, deepest))
        nodes, text = self._block()
        growth = self._growing([self._context.root], None, most, deepest)
        grown: Grown = yield Pass(self._drafter.grow, (nodes, growth))
        self._own.cache.commit(range(text))
        return self._draft_of(grown, 1)

    def _block(self) -> tuple[Nodes, int]:
        """The rows of a block behind those of text that wait, and the number of the latter."""
        features = self._own.catch_up()
        step = self._own.text_rows([0] * len(features) + self._step.tokens(self._context.root))
        return Nodes(step, features), len(features)

    def _absorb(self, features: torch.Tensor) -> None:
        step = self._own.text_rows(range(len(features)))
        self._step.absorb(step, features)
        self._own.read_text(step, root=False)

    def _begin(self, deepest: int) -> Passes[None]:
        nodes, text = self._block()
        self._guess = guess = yield Pass(self._drafter.guess, nodes)
        self._own.cache.commit(range(text))
        self._states = {}
        if self._stays:
            self._root = guess.rows.tokens[0, text : text + 1]

    def _behind(self, tree: Growth, level: Sequence[int], tokens: Tokens) -> Passes[Behind]:
        yield from ()
        guess, transitions, depth = self._guess, self._drafter.transitions, tree.depths[level[0]]
        assert guess is not None
        if not transitions.known:  # what is said does not depend on their tokens
            level = level[:1]
        hidden, logits = (rows[depth].expand(len(level), -1) for rows in (guess.states, guess.logits))
        states = None
        if transitions.recurrent and depth:
            states = torch.stack([self._states[tree.parents[node]] for node in level])
        said = transitions.said(hidden, logits, tokens[: len(level)], states, confident=not self._stays)
        if said.states is not None:
            self._states |= dict(zip(level, said.states, strict=True))
        return Behind(said.logits, said.chances)
