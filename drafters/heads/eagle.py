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
from pathlib import Path

import torch

from drafters.heads.chain_step import ChainStep, Guess, Nodes
from drafters.heads.config import ChainConfig
from drafters.heads.loading import describe, load_head
from drafters.heads.session import HeadSession, Ranked, check_chance
from drafters.heads.weights import Chain
from drafters.shared.scored_tree import ScoredTree
from drafters.shared.vocabulary import DraftVocabulary
from drafters.shared.weights import weights_folder
from specdec.drafter import Context, DrafterBase, Observation
from specdec.settings.parsing import check_positive
from specdec.step.forward_passes import Pass, Passes
from specdec.step.tree import Draft
from specdec.target import Target

__all__ = ["Eagle", "EagleConfig"]

_DEPTH = 6  # tokens below the root, where nothing is said
_BRANCH, _WIDTH = 8, 8  # children of a row that are looked at, and rows of a level that are extended


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


class Eagle(DrafterBase):
    """A trained EAGLE head, chain or tree."""

    name = "eagle"
    draws = False
    needs_draft = False
    Config = EagleConfig

    def __init__(self, config: EagleConfig, head: Chain, target: Target) -> None:
        super().__init__(config)
        assert isinstance(head.config, ChainConfig)
        self.vocabulary = DraftVocabulary(head.draft_tokens, target)
        self.step = ChainStep(head, self.vocabulary.head, target)
        self.layers = head.config.taps  # in the order in which they are read
        self.taps = frozenset(self.layers)
        self.at_once = head.config.kind == "peagle"
        self.depth = config.tokens or head.config.depth or _DEPTH
        self.mask_token = head.config.mask_token

    @classmethod
    def build(cls, config: EagleConfig, target: Target) -> Eagle:
        """Load the head for a target.

        Raises:
            CheckpointError: no head, a broken one, or one of another model.
        """
        folder = weights_folder(config.head, target, "eagle.head")
        head = load_head(folder, cls.name, target, check_target=config.check_target)
        assert isinstance(head, Chain)
        return cls(config, head.to(target.head_device, target.dtype), target)

    @classmethod
    def describe_weights(cls, folder: Path) -> list[str]:
        """What a folder holds, for ``specdec drafters --check``.

        Raises:
            CheckpointError: no head of this drafter's.
        """
        return describe(folder, cls.name)

    def start(self, context: Context) -> EagleSession:
        return EagleSession(self, context)

    def guess(self, brought: Sequence[Nodes]) -> list[Guess]:
        """What follows the rows that each sequence brought."""
        return self.step.guess(brought)


class _Growth:
    """The guesses of a step: a tree of tokens, each with the chance that it is reached. Node 0 is the root."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [-1], [0]
        self.chances, self.reach = [1.0], [1.0]  # that it is right where its parent is; and that all above is, too
        self.below = dict[int, list[int]]()  # of a node its children, likeliest first

    def add(self, node: int, ranked: Ranked, sure: float) -> None:
        """Put the guesses below a node, of whose chances so much is believed, likeliest first."""
        for token, chance in ranked:
            chance = min(1.0, sure * chance)
            self.below.setdefault(node, []).append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.chances.append(chance)
            self.reach.append(self.reach[node] * chance)

    def best(self, most: int) -> list[int]:
        """The likeliest nodes below the root, parents before children."""
        return sorted(range(1, len(self.tokens)), key=self.reach.__getitem__, reverse=True)[:most]

    def path(self, node: int) -> list[int]:
        """Tokens below the root, down to and with a node."""
        found = list[int]()
        while node:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]


class EagleSession(HeadSession):
    def __init__(self, drafter: Eagle, context: Context) -> None:
        step = drafter.step
        rows = _WIDTH * drafter.depth + 1
        least = drafter.config.min_chance
        super().__init__(context, drafter.vocabulary, drafter.layers, step.specs, step.weights, rows, least)
        self._drafter, self._step = drafter, step
        self._grown: _Growth | None = None
        self._promises = dict[int, float]()  # of an extended node, what the head promised of its likeliest child

    def _absorb(self, features: torch.Tensor) -> None:
        block = self._own.text_block(self._tokens_of(features))
        self._step.guess([Nodes(block, features)])
        self._own.read_text(block, root=False)

    def _tokens_of(self, features: torch.Tensor) -> list[int]:
        """The tokens that go with the next hidden states: each one stands a place behind its own."""
        first = self._own.cache.length + 1
        return self._context.tokens[first : first + len(features)]

    def _learn(self, seen: Observation) -> None:
        grown, self._grown = self._grown, None
        self._own.commit(seen, [] if grown is None else grown.tokens, most=1)
        if grown is None or seen.draft is None:
            return
        node = 0
        for token in seen.tokens:
            if node not in grown.below:
                break
            children = grown.below[node]
            right = next((child for child in children if grown.tokens[child] == token), None)
            promised = self._promises.get(node, 0.0)
            self._note(promised, promised > 0 and right == children[0], right is not None)
            if right is None:
                break
            node = right

    def passes(self, row_budget: int) -> Passes[Draft]:
        context, drafter = self._context, self._drafter
        most = min(row_budget - 1, self._most, drafter.config.rows or row_budget)
        deepest = min(drafter.depth, context.remaining - 1)
        self._own.begin()
        if not self._behind or most < 1 or deepest < 1:
            return Draft.chain([context.root])
        guess = yield from (self._masked(deepest - 1) if drafter.at_once else self._first())
        self._grown, self._promises = _Growth(context.root), {}
        if self._draws:
            return (yield from self._drawn(guess, most, deepest))
        if drafter.at_once:
            return self._at_once(guess, most)
        return (yield from self._grow(guess, most, deepest))

    def _first(self) -> Passes[Guess]:
        """What follows the root: the head sees what was committed, up to and with the root's row."""
        features = self._own.catch_up()
        block = self._own.text_block(self._tokens_of(features))
        guess: Guess = yield Pass(self._drafter.guess, Nodes(block, features))
        self._own.read_text(block)
        return guess

    def _masked(self, masks: int) -> Passes[Guess]:
        """What follows the root, and masks behind it, of which nothing is kept."""
        features, state = self._own.catch_up(), self._step.mask_state
        assert state is not None
        block = self._own.text_block([*self._tokens_of(features), *[self._drafter.mask_token] * masks])
        nodes = Nodes(block, features, state.expand(masks, -1), asked=masks + 1)
        guess: Guess = yield Pass(self._drafter.guess, nodes)
        self._own.cache.commit(range(len(features)))
        return guess

    def _grow(self, guess: Guess, most: int, deepest: int) -> Passes[Draft]:
        """Level by level, as far as it pays."""
        grown, branch = self._grown, min(self._drafter.config.branch, most)
        assert grown is not None
        level, passes = [0], 1
        while True:
            depth = grown.depths[level[0]]
            scores = self._scores(guess.logits, [grown.path(node) for node in level])
            for node, ranked in zip(level, self._ranked(scores, depth, branch), strict=True):
                self._promises[node] = ranked[0][1] if ranked else 0.0
                grown.add(node, ranked, self._sure)
            best = grown.best(most)
            kept = best[: self._count([grown.reach[node] for node in best])]
            onward = [node for node in kept if grown.depths[node] == depth + 1][:_WIDTH]
            if depth + 1 >= min(deepest, most) or not self._extending_pays([grown.reach[node] for node in onward]):
                return self._draft(grown, kept, passes)
            states = guess.states[[level.index(grown.parents[node]) for node in onward]]
            level, passes = onward, passes + 1
            guess = yield self._onward(grown, level, states)

    def _onward(self, grown: _Growth, level: Sequence[int], states: torch.Tensor) -> Pass:
        """Guesses through the head, with the head's own hidden states before them."""
        block = self._own.draft_block(level, grown.parents, [grown.tokens[node] for node in level])
        return Pass(self._drafter.guess, Nodes(block, states=states, asked=len(level)))

    def _at_once(self, guess: Guess, most: int) -> Draft:
        """All depths were asked for, so that a token is as likely behind any of those above it."""
        grown, branch = self._grown, min(self._drafter.config.branch, most)
        assert grown is not None
        guesses = list[Ranked]()
        for depth, logits in enumerate(guess.logits):
            (ranked,) = self._ranked(self._scores(logits[None], [[]]), depth, branch)
            if not ranked:
                break
            guesses.append(ranked)
        if not guesses:
            return self._draft(grown, [], 1)
        believed = [[(token, min(self._sure * chance, 1.0)) for token, chance in ranked] for ranked in guesses]
        tree = ScoredTree()
        least = self._margin.least if self._least is None else None
        tree.grow(lambda row: believed[tree.depths[row]], most, len(guesses), least)
        kept = self._count(tree.reach[1:])
        where = [0]
        for row in range(1, min(len(tree), 1 + max(kept, 1))):
            node, ranked, token = where[tree.parents[row]], guesses[tree.depths[row] - 1], tree.tokens[row]
            self._promises.setdefault(node, ranked[0][1])
            grown.add(node, [(token, dict(ranked)[token])], self._sure)
            where.append(len(grown.tokens) - 1)
        return self._draft(grown, where[1 : 1 + kept], 1)

    def _drawn(self, guess: Guess, most: int, deepest: int) -> Passes[Draft]:
        """A chain, each token drawn from the head's distribution, as far as it pays."""
        grown, at_once = self._grown, self._drafter.at_once
        assert grown is not None
        q, passes, reached = dict[int, torch.Tensor](), 1, 1.0
        for row in range(min(deepest, most)):
            logits = guess.logits[row if at_once else 0][None]
            drawn = self._draw(self._scores(logits, [grown.tokens[1:]])[0], row)
            if drawn is None:
                break
            token, largest, q[row] = drawn
            grown.add(row, [(token, 1.0)], 1.0)
            # By q and by what became of other draws, never by the token itself.
            reached *= (largest + self._accepted / self._guesses) / 2
            price = 0.0 if at_once else self._price
            if row + 1 == min(deepest, most) or not self._drawing_pays(reached, row + 1, price):
                break
            if not at_once:
                guess = yield self._onward(grown, [row + 1], guess.states)
                passes += 1
        return Draft(grown.tokens, range(-1, len(grown.tokens) - 1), q=q, cost=passes * self._price)

    def _draft(self, grown: _Growth, kept: Sequence[int], passes: int) -> Draft:
        """The rows that are verified, likeliest first."""
        rows = {0: 0, **{node: row for row, node in enumerate(kept, 1)}}
        nodes = [0, *kept]
        parents = [-1, *(rows[grown.parents[node]] for node in kept)]
        chances = [grown.chances[node] for node in nodes]
        return Draft([grown.tokens[node] for node in nodes], parents, cost=passes * self._price, chances=chances)
