"""EAGLE (Li et al. 2024, arXiv 2401.15077 and 2406.16858; 2025, arXiv 2503.01840): a layer that drafts token by token.

Row i of the head reads the target's hidden state of position i, in EAGLE-3 those of some layers, and the embedding of
token i + 1, and says what comes behind that token. Where the target has not been yet, the head's own hidden state
stands for the target's. So a step begins with the rows of what was committed since the last one, whose last row is the
root's, and goes on with rows of the tokens that are guessed, level by level: of all guesses those are extended whose
chance to be reached is worth a pass, and those are verified that are worth their rows (EAGLE-2's tree, by measured
costs). What the head computed from its own states is thrown away, as the target's are there by the next step.

P-EAGLE (arXiv 2602.01469) asks for all depths at once, with masks where nothing is known.

When sampling, tokens are ranked with the noise with which the target will draw, see
:func:`drafters.shared.vocabulary.coupled`; under ``reject`` a chain is drawn, and carries its q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.heads.chain_step import ChainStep, Guess, Nodes
from drafters.heads.growing import WIDTH, Behind, check_chance
from drafters.heads.growth import Growth
from drafters.heads.session import HeadDrafter, HeadSession
from drafters.heads.weights import Chain, HeadWeights
from specdec.drafter import Context
from specdec.settings.parsing import check_positive
from specdec.step.forward_passes import Pass, Passes
from specdec.target import Target

__all__ = ["Eagle", "EagleConfig"]

_DEPTH = 6  # tokens below the root, where nothing is said
_BRANCH = 8  # children of a row that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Options.

    Attributes:
        head: folder of a trained head, EAGLE-1 to 3.1 or P-EAGLE, in any format that `specdec drafters --check` knows;
            None is the one in this package that was trained for the model.
        tokens: depth of a draft, at most; each level costs a pass of the head. None is 6, or what a P-EAGLE head was
            published to draft.
        rows: rows of a draft below the root, at most; None leaves it to what pays.
        branch: children of a row, at most; 1 makes a chain. Under ``reject`` it is 1.
        min_chance: verify and extend whatever is reached with this chance, by the head, as far as ``rows`` and
            ``tokens`` go, as the papers do with fixed sizes; None takes what pays by measured costs.
        check_target: refuse a model that is not the one the head was trained for.
    """

    head: str | None = None
    tokens: int | None = None
    rows: int | None = None
    branch: int = _BRANCH
    min_chance: float | None = None
    check_target: bool = True

    def __post_init__(self) -> None:
        check_positive("eagle.", tokens=self.tokens, rows=self.rows, branch=self.branch)
        check_chance("eagle.", self.min_chance)


class Eagle(HeadDrafter):
    """A trained EAGLE head, chain or tree."""

    name = "eagle"
    Config = EagleConfig

    def __init__(self, config: EagleConfig, head: HeadWeights, target: Target) -> None:
        super().__init__(config, head, target)
        assert isinstance(head, Chain)
        self.step = ChainStep(head, self.vocabulary.head, target)
        self.at_once = head.config.kind == "peagle"
        self.depth = config.tokens or head.config.depth or _DEPTH
        self.mask_token = head.config.mask_token

    def start(self, context: Context) -> EagleSession:
        return EagleSession(self, context)

    def guess(self, brought: Sequence[Nodes]) -> list[Guess]:
        """What follows the rows that each sequence brought."""
        return self.step.guess(brought)


class EagleSession(HeadSession):
    def __init__(self, drafter: Eagle, context: Context) -> None:
        step, config = drafter.step, drafter.config
        rows = WIDTH * drafter.depth + 1
        super().__init__(context, drafter, step.specs, step.weights, rows)
        self._drafter, self._step, self._config = drafter, step, config
        self._guess: Guess | None = None  # of the latest level
        self._level: Sequence[int] = []

    def _absorb(self, features: torch.Tensor) -> None:
        block = self._own.text_block(self._tokens_of(features))
        self._step.guess([Nodes(block, features)])
        self._own.read_text(block, root=False)

    def _tokens_of(self, features: torch.Tensor) -> list[int]:
        """The tokens that go with the next hidden states: each one stands a place behind its own."""
        first = self._own.cache.length + 1
        return self._context.tokens[first : first + len(features)]

    def _begin(self, deepest: int) -> Passes[None]:
        features, drafter = self._own.catch_up(), self._drafter
        tokens = self._tokens_of(features)
        if not drafter.at_once:  # the head sees what was committed, up to and with the root's row
            block = self._own.text_block(tokens)
            self._guess = yield Pass(drafter.guess, Nodes(block, features))
            self._own.read_text(block)
            return
        masks, state = deepest - 1, self._step.mask_state  # behind the root's row, and nothing of them is kept
        assert state is not None
        block = self._own.text_block([*tokens, *[drafter.mask_token] * masks])
        self._guess = yield Pass(drafter.guess, Nodes(block, features, state.expand(masks, -1), asked=masks + 1))
        self._own.cache.commit(range(len(features)))

    def _behind(self, grown: Growth, level: Sequence[int]) -> Passes[Behind]:
        depth = grown.depths[level[0]]
        assert self._guess is not None
        if self._drafter.at_once:  # a token is as likely behind any of those above it
            return Behind(self._guess.logits[depth][None])
        if depth:
            states = self._guess.states[[self._level.index(grown.parents[node]) for node in level]]
            block = self._own.draft_block(level, grown.parents, [grown.tokens[node] for node in level])
            self._guess = yield Pass(self._drafter.guess, Nodes(block, states=states, asked=len(level)))
        self._level = level
        return Behind(self._guess.logits)
