"""The strategy interface: a drafter proposes trees, and is told what became of them.

A *drafter* holds what sequences share: options, weights, a datastore. A *session* holds one sequence's state and has
two methods. Exactness does not depend on it: whatever a session proposes, the engine emits the target's own text.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch

from specdec.budget import Budget
from specdec.cache import KVCache
from specdec.draft import Draft
from specdec.sampling import Noise, SamplingParams, Scores
from specdec.target import Target

__all__ = ["Context", "DraftSession", "Drafter", "DrafterBase", "Observation"]


@dataclass(slots=True, eq=False)
class Context:
    """What a session sees of its sequence, live.

    Attributes:
        target: the model; its layers may be run into scratch slots (see Kangaroo).
        cache: the target's cache; ``cache.length == len(tokens) - 1`` between steps. Only the engine commits.
        tokens: prompt and emitted tokens; the last one is the root. Read only.
        prompt_length: how many of them are the prompt.
        remaining: tokens that may still be emitted; a draft deeper than ``remaining - 1`` is partly wasted.
        max_rows: most rows of a draft, the root included.
        sampling: how tokens are chosen.
        noise: for drafts that are sampled: use stream ``Noise.DRAFT`` at position ``len(tokens)``.
        rng: seeded by ``sampling.seed``, for choices that are no draws from a distribution.
        budget: what rows cost and bring, where the engine has one.
    """

    target: Target
    cache: KVCache
    tokens: list[int]
    prompt_length: int
    remaining: int
    max_rows: int
    sampling: SamplingParams
    noise: Noise
    rng: random.Random
    budget: Budget | None = None

    @property
    def root(self) -> int:
        """The last emitted token."""
        return self.tokens[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What became of a step, or of a chunk of the prompt.

    Attributes:
        draft: as proposed; None for a chunk of the prompt. Where drafts of several sessions were merged, rows that were
            left out are among its probes, and accepted rows of others are appended.
        path: accepted rows, root first, which are committed now; for a chunk all of its rows.
        tokens: the tokens emitted, bonus last; for a chunk its own tokens. They stand in ``Context.tokens`` already.
        scores: logits of the draft's scored rows; None for a chunk.
        taps: the drafter's ``taps``: layer -> [T, D], all rows of the block.
    """

    draft: Draft | None
    path: Sequence[int]
    tokens: Sequence[int]
    scores: Scores | None = None
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def argmax(self, row: int) -> int:
        """The target's greedy token after a scored row of the draft."""
        assert self.scores is not None
        return self.scores.argmax(row)


class DraftSession(Protocol):
    """One sequence's drafting state."""

    def propose(self, room: int) -> Draft:
        """A tree of at most ``room`` rows, the root included; the root alone is a plain step."""

    def observe(self, seen: Observation) -> None:
        """Learn from a step (or a chunk of the prompt, if the drafter has taps)."""


class Drafter(Protocol):
    """A drafting strategy."""

    name: str
    taps: frozenset[int]

    def start(self, context: Context) -> DraftSession:
        """A session for a new sequence, called once the prompt is known and before it is run."""


class DrafterBase:
    """What a drafter written as a class with a config gets for free; subclassing it is optional.

    ``Config`` is a frozen, keyword-only dataclass that checks itself; its fields are the drafter's options. A drafter
    with ``budgeted`` always has ``context.budget`` and weighs its rows by it; that of others bounds their room. Where
    ``learns`` is False, sessions have no use for ``observe``: the tokens in the context are all they need, and without
    taps they are told nothing. ``effort`` is what a draft costs beside its rows, in rows of a small model, for drafters
    whose search is not free.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Any]]
    taps: frozenset[int] = frozenset()
    budgeted: ClassVar[bool] = False
    learns: ClassVar[bool] = True
    effort: ClassVar[int] = 0

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    @classmethod
    def build(cls, config: Any, target: Target) -> DrafterBase:
        """Make the drafter for a target; override it where weights have to fit the target."""
        return cls(config)
