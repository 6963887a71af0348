"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads on the last hidden state guess several tokens at once.

The root is at position n. The last accepted row left the hidden state of position n - 1, from which the target chose
the root. Head k reads that state (and, if it was trained so, the root's embedding) and guesses position n + k without
the tokens in between. So a tree is a list of *rank paths*: path (0, 2) is the first head's best token and behind it the
second head's third best. In the paper the tree is fixed. Here, if none is given, a new tree grows in every step by the
heads' probabilities, as far as its rows pay, which may be not at all. Ranks are chosen, not drawn, so a draft has no q.
When sampling, tokens are ranked with the noise that the target will draw with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch

from drafters.medusa.heads import MedusaHeads
from drafters.medusa.heads_step import HeadsStep, State
from drafters.medusa.rank_paths import Node, check_tree, nodes_of, paths_of
from drafters.medusa.recorded_heads import RecordedHeads
from drafters.shared.calibration import Calibration
from drafters.shared.scored_tree import Guesses, ScoredTree
from drafters.shared.vocabulary import DraftVocabulary, coupled, processed, top_k
from drafters.shared.weights import check_fit, weights_folder
from specdec.costs.curve import pass_price
from specdec.costs.prices import Prices
from specdec.drafter import BatchedSession, Context, DeviceStep, DrafterBase, Observation
from specdec.sampling.noise import Noise
from specdec.step.forward_passes import Pass, Passes
from specdec.step.tree import Draft, Hints
from specdec.target import FINAL, Target

__all__ = ["Medusa", "MedusaConfig"]

Ranked = Sequence[Sequence[Sequence[float]]]  # per head, of its likeliest tokens: numbers, and chances
_MOST, _RANKS = 63, 10  # nodes of a tree, and ranks in it, as the authors' has
_FAINT = 0.01  # a node with a smaller reach is not considered, even where rows are free
_PRIOR, _PRIOR_WEIGHT = 0.8, 4.0  # prior of the factor on the heads' probabilities, and its weight in guesses


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Options.

    Attributes:
        heads: folder of trained heads, ours or published ones; None is the one in this package that was trained for the
            model.
        tree: a name in ``TREES``, a ``.yaml`` file with a list of rank paths, or such a list, as
            ``[[0], [0, 0], [1]]``, likeliest first, as a small budget cuts the end; None grows a tree in every step
            from the rows that pay, by the heads' probabilities and how often they were right in this text.
        check_target: refuse a model that is not the one the heads were trained for.
    """

    heads: str | None = None
    tree: str | list[list[int]] | None = None
    check_target: bool = True

    def __post_init__(self) -> None:
        if self.tree is not None:
            check_tree(paths_of(self.tree))


class Medusa(DrafterBase):
    """Trained heads, stacked so that all run at once, and the tree."""

    name = "medusa"
    draws = False
    Config = MedusaConfig
    taps = frozenset({FINAL})
    needs_draft = False
    fixed_cost_rows = 3  # not in a pass's price: noise and best tokens of every head, and the tree

    def __init__(self, config: MedusaConfig, heads: MedusaHeads, target: Target) -> None:
        super().__init__(config)
        self.vocabulary = DraftVocabulary(heads.draft_tokens, target)
        own = heads.config
        self.nodes: list[Node] | None = None
        depth, self.ranks = own.heads, min(_RANKS, own.ranks)
        if config.tree is not None:
            paths = paths_of(config.tree)
            check_tree(paths, heads=own.heads, ranks=own.ranks)
            self.nodes = nodes_of(paths)
            depth, self.ranks = max(map(len, paths)), max(map(max, paths)) + 1
        self.step = HeadsStep(heads, depth, self.vocabulary.head, target)
        head = own.ranks * own.hidden_size * (depth if own.own_head else 1)
        blocks = depth * own.hidden_size * (own.input_size + (own.layers - 1) * own.hidden_size)
        self.weights = head + blocks  # that a guess reads
        recording = target.recording
        self.recorded: RecordedHeads | None = None
        if recording is not None and not self.step.native:
            device = target.head_device
            noise = self.vocabulary.noise(Noise(0, target.vocab_size, device))
            like = torch.zeros(1, target.hidden_size, dtype=target.dtype, device=device)
            self.recorded = RecordedHeads(recording.recorder, self.step.logits, self.readable, noise, like)

    @classmethod
    def build(cls, config: MedusaConfig, target: Target) -> Medusa:
        """Load the heads for a target.

        Raises:
            CheckpointError: there are no heads, they are broken, or they belong to another model.
            ConfigError: a tree that the heads or the vocabulary cannot fill.
        """
        heads = MedusaHeads.from_pretrained(weights_folder(config.heads, target, "medusa.heads"))
        check_fit(heads.config, target, cls.name, check_target=config.check_target)
        return cls(config, heads.to(target.head_device, target.dtype), target)

    @classmethod
    def describe_weights(cls, folder: Path) -> list[str]:
        """A description of the weights in a folder, for ``specdec drafters --check``.

        Raises:
            CheckpointError: no heads, or broken ones.
        """
        own = MedusaHeads.from_pretrained(folder).config
        sizes = f"width {own.hidden_size}, vocabulary {own.vocab_size}"
        return [
            f"{own.heads} Medusa heads of {own.layers} blocks",
            f"for {own.target or 'a model'}: {sizes}",
            f"use them with --drafter {cls.name} --set {cls.name}.heads={folder}",
        ]

    def start(self, context: Context) -> MedusaSession:
        return MedusaSession(self, context)

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        if self.recorded is not None:
            self.recorded.warm_up()

    def readable(self, logits: torch.Tensor) -> torch.Tensor:
        """int64, the bits of :meth:`ranked` of one state's logits [heads, d]."""
        return self.ranked([logits]).flatten().view(torch.int64)

    def ranked(self, logits: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, heads, 2, ranks] float64: numbers and chances of heads' likeliest tokens, by N times [heads, d]."""
        best = torch.softmax(torch.stack([*logits]), -1, dtype=torch.float32).topk(self.ranks, -1)
        return torch.stack((best.indices.double(), best.values.double()), -2)

    def lists(self, brought: Sequence[tuple[State, MedusaSession | None]]) -> list[Ranked]:
        """The same as lists, of the state that each sequence brought; with the session of one that samples."""
        states, sessions = zip(*brought, strict=True)
        logits = self.step.each(states)
        lists = list[Ranked]()
        for own, session in zip(logits, sessions, strict=True):
            ranked = top_k(own, self.ranks, None, 0, 0.0) if session is None else session.top_k(own)
            if ranked is None:  # then of all of them
                break
            lists.append([*zip(*ranked, strict=True)])
        else:
            return lists
        parts = zip(logits, sessions, strict=True)
        drawn = [own if session is None else session.drawn(own) for own, session in parts]
        return self.ranked(drawn).tolist()


def _fixed(nodes: Sequence[Node], ranked: Ranked, most: int) -> ScoredTree:
    """The first ``most`` nodes that may be right: not deeper than the heads, nor forbidden by processors."""
    tree, rows = ScoredTree(), [0]  # of each node its row; -1: left out
    for node in nodes:
        if len(tree) > most:
            break
        parent = rows[node.parent]
        if parent < 0 or node.depth > len(ranked) or not ranked[node.depth - 1][1][node.rank] > 0:
            rows.append(-1)
            continue
        numbers, chances = ranked[node.depth - 1]
        rows.append(len(tree))
        tree.add(parent, int(numbers[node.rank]), chances[node.rank])
    return tree


def _sound(guesses: Ranked) -> Ranked:
    """The guesses before the first one with NaN, which a product gives that overflows because of large weights."""
    return [*takewhile(lambda guess: not any(map(math.isnan, guess[1])), guesses)]


class MedusaSession(BatchedSession):
    def __init__(self, drafter: Medusa, context: Context) -> None:
        self._drafter, self._context = drafter, context
        costs, length = context.costs, context.prompt_length
        self._price = pass_price(drafter.weights, context.target, costs, length)
        self._prices = Prices(costs)
        self._least = self._prices.least_reach(length, _MOST, _FAINT)
        self._calibration = Calibration(_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT)  # of first ranks behind right ones
        self._seen: Mapping[int, torch.Tensor] | None = None  # the latest taps; none for a prompt of one token ...
        self._last = 0  # ... and the row before the root
        self._guesses: Ranked | None = None  # guesses after the latest step, if they are known already
        params = context.sampling
        self._temperature = params.temperature
        self._samples = params.temperature > 0 and params.acceptance != "typical"
        self._noise = drafter.vocabulary.noise(context.noise)
        self._processors = replace(params, repetition_penalty=1.0).processors()  # without the one that reads the text
        self._filters = len(self._processors) > (params.temperature not in (0, 1))  # they do more than divide

    def passes(self, row_budget: int) -> Passes[Draft]:
        """The tree, less what is deeper than the text may get, has no chance at all or does not fit."""
        drafter, context = self._drafter, self._context
        deepest = context.remaining - 1
        if self._seen is None or row_budget < 2 or deepest < 1:
            return Draft.chain([context.root])
        if self._guesses is None:
            self._guesses = _sound((yield Pass(drafter.lists, self._brought())))
        ranked = self._guesses[:deepest]
        sure = self._calibration.share
        if not ranked:
            return Draft([context.root], [-1], hints=Hints(cost=self._price))
        tree, size = self._tree(ranked, row_budget - 1, sure)
        token_of = drafter.vocabulary.token
        tokens = [context.root, *(token_of(int(number)) for number in tree.tokens[1:size])]
        wrong = max(1 - sure * ranked[0][1][0], 0.01)
        # As many tokens as a match that is right so often goes on for.
        return Draft(tokens, tree.parents[:size], hints=Hints(match_length=int(1 / wrong), cost=self._price))

    def _tree(self, ranked: Ranked, most: int, sure: float) -> tuple[ScoredTree, int]:
        """The given tree, or else one of the likeliest nodes; and how many of its rows are verified."""
        if self._drafter.nodes is not None:
            tree = _fixed(self._drafter.nodes, ranked, most)
            return tree, len(tree)
        tree, heads = ScoredTree(), list[Guesses]()

        def guesses(row: int) -> Guesses:
            head = tree.depths[row]
            if head == len(heads):
                heads.append(
                    [(int(number), min(sure * chance, 1.0)) for number, chance in zip(*ranked[head], strict=True)]
                )
            return heads[head]

        tree.grow(guesses, min(most, _MOST), len(ranked), self._least)
        return tree, 1 + self._prices.keep(tree.reach[1:], self._context.prompt_length)

    def top_k(self, logits: torch.Tensor) -> tuple[list[list[int]], list[list[float]]] | None:
        """The likeliest tokens of the target's draws, from the heads' logits [heads, d], or None."""
        scores, ranks, position = self._processed(logits), self._drafter.ranks, len(self._context.tokens)
        return top_k(scores, ranks, self._noise, position, self._temperature)

    def drawn(self, logits: torch.Tensor, depth: torch.Tensor | None = None) -> torch.Tensor:
        """[heads, d] logits of the tokens that the target will draw, from the heads' logits.

        ``depth`` is that of the last row of a step that has not ended, see :class:`specdec.drafter.DeviceStep`.
        """
        position, heads = len(self._context.tokens), range(len(logits))
        if depth is None:
            noise = torch.stack([self._noise.gumbel(position + head) for head in heads])
        else:
            noise = self._noise.gumbel_at(depth + torch.arange(1, 1 + len(heads), device=depth.device) + position)
        return coupled(self._processed(logits), noise, self._temperature)

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """The heads' logits [heads, d] after the processors of the target's logits."""
        if not self._processors:
            return logits
        ids = torch.empty(1, 0, dtype=torch.long, device=logits.device)
        return processed(logits.float(), ids, self._processors)

    def _brought(self) -> tuple[State, MedusaSession | None]:
        """The heads' input, and the session that ranks their guesses with noise; None without sampling."""
        assert self._seen is not None
        return State(self._seen[FINAL], self._last, self._context.root), self if self._samples else None

    def readback(self, step: DeviceStep) -> torch.Tensor | None:
        hidden = step.output.hidden[FINAL]
        state, recorded = hidden.index_select(0, step.last.to(hidden.device)), self._drafter.recorded
        if recorded is not None and not (self._samples and self._filters):
            start = self._noise.starts_at(step.depth + (len(self._context.tokens) + 1)) if self._samples else None
            found = recorded.guess(state, step.root, start, self._temperature)
            if found is not None:
                return found
        (logits,) = self._drafter.step.logits(state, step.root)
        return self._drafter.readable(self.drawn(logits, step.depth) if self._samples else logits)

    def missed(self) -> None:
        self._seen = self._guesses = None  # the next step is a plain one, which shows the state behind it

    def observe(self, seen: Observation) -> None:
        guesses = self._guesses if self._guesses is not None and seen.draft is not None else ()
        for (numbers, chances), token in zip(guesses, seen.tokens, strict=False):
            right = self._drafter.vocabulary.token(int(numbers[0])) == token
            self._calibration.learn(chances[0], right)
            if not right:
                break
        self._seen, self._last, self._guesses = seen.taps, seen.path[-1], None
        prompt_ends = seen.draft is None and self._context.cache.length == self._context.prompt_length - 1
        if prompt_ends and self._context.target.launches:
            # Guesses come with a step's copy. The first ones are read here, so that no step needs a second copy.
            self._guesses = _sound(*self._drafter.lists([self._brought()]))
        if seen.readback is not None:
            ranked = np.array(seen.readback, dtype=np.int64).view(np.float64)
            self._guesses = _sound([(own[0], own[1]) for own in ranked.reshape(-1, 2, self._drafter.ranks).tolist()])
