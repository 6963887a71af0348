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

from drafters.heads.block_step import Blank, BlockStep, Sequel
from drafters.heads.growing import Behind, HeadOptions
from drafters.heads.growth import Growth
from drafters.heads.native_growth import Grown, NativeGrowth, grow_block
from drafters.heads.session import HeadDrafter
from drafters.heads.settled import Settled
from drafters.heads.transitions import Said, Transitions
from drafters.heads.unread import UnreadSession
from drafters.heads.weights import Block, HeadWeights
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

    def run(self, brought: Sequence[Blank]) -> list[Sequel]:
        """Run the block of each sequence."""
        return self.step.run(brought)

    @property
    def grows(self) -> bool:
        """Whether the native library can grow drafts."""
        return self._described is not None

    def grow(self, several: Sequence[tuple[Blank, NativeGrowth]]) -> list[Grown]:
        """Run the block of each sequence, and grow its draft."""
        assert self._described is not None
        sequels = self.step.run([blank for blank, _ in several])
        return [
            grow_block(self._described, growth, sequel.hidden, sequel.logits)
            for (_, growth), sequel in zip(several, sequels, strict=True)
        ]


class DFlashSession(UnreadSession):
    def __init__(self, drafter: DFlash, context: Context) -> None:
        step = drafter.step
        super().__init__(context, drafter, step.specs, step.weights, 2 * step.config.block_size)
        self._drafter, self._step = drafter, step
        self._sequel: Sequel | None = None
        self._states = dict[int, torch.Tensor]()  # states of a recurrent bias, by node
        self._grows = drafter.grows and self._plain and not self._draws
        self._stays = self._stays and step.native is None

    def missed(self) -> None:
        self._miss()

    def _grow(self, most: int, deepest: int) -> Passes[Draft]:
        if not self._grows:
            return (yield from super()._grow(most, deepest))
        blank = self._blank()
        growth = self._growing([self._context.root], None, most, deepest)
        grown: Grown = yield Pass(self._drafter.grow, (blank, growth))
        self._own.cache.commit(range(len(blank.features)))
        return self._draft_of(grown, 1)

    def _blank(self) -> Blank:
        features = self._own.catch_up()
        step = self._own.text_rows([0] * len(features) + self._step.tokens(self._context.root))
        return Blank(step, features)

    def _absorb(self, features: torch.Tensor) -> None:
        step = self._own.text_rows(range(len(features)))
        self._step.absorb(step, features)
        self._own.read_text(step, root=False)

    def _begin(self, deepest: int) -> Passes[None]:
        blank = self._blank()
        self._sequel = sequel = yield Pass(self._drafter.run, blank)
        self._own.cache.commit(range(len(blank.features)))
        self._states = {}
        if self._stays:
            self._root = sequel.rows.tokens[0, len(blank.features) : len(blank.features) + 1]

    def _logits_there(
        self, shape: Settled, depth: int, above: Sequence[int], tokens: torch.Tensor
    ) -> Passes[torch.Tensor]:
        yield from ()
        level = shape.levels[depth]
        said = self._said(depth, level, shape.parents, tokens, confident=False)
        return said.logits.expand(len(level), -1)

    def _behind(self, grown: Growth, level: Sequence[int]) -> Passes[Behind]:
        yield from ()
        tokens = [grown.tokens[node] for node in level]
        said = self._said(grown.depths[level[0]], level, grown.parents, tokens)
        return Behind(said.logits, said.chances)

    def _said(
        self,
        depth: int,
        level: Sequence[int],
        parents: Sequence[int],
        before: Sequence[int] | torch.Tensor,
        *,
        confident: bool = True,
    ) -> Said:
        """What is said behind nodes of a depth, or behind one of them where that does not depend on their tokens."""
        sequel, transitions = self._sequel, self._drafter.transitions
        assert sequel is not None
        if not transitions.known:
            level = level[:1]
        hidden, logits = (states[depth].expand(len(level), -1) for states in (sequel.hidden, sequel.logits))
        states = None
        if transitions.recurrent and depth:
            states = torch.stack([self._states[parents[node]] for node in level])
        said = transitions.said(hidden, logits, before[: len(level)], states, confident=confident)
        if said.states is not None:
            self._states |= dict(zip(level, said.states, strict=True))
        return said
