"""The strategy interface: a drafter proposes trees, and is told what became of them.

A *drafter* holds what sequences share: options, weights, a datastore. A *session* holds one sequence's state and has
two methods. Exactness does not depend on it: whatever a session proposes, the engine emits the target's own text.
(:class:`BatchedSession` and :class:`ReadbackSession` are for drafters with a model, which may say more.)
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import torch

from specdec.costs.curve import CostCurve, roofline
from specdec.costs.policy import RowPolicy
from specdec.errors import SpecdecWarning
from specdec.sampling.noise import Noise
from specdec.sampling.scores import Scores
from specdec.settings.sampling_params import SamplingParams
from specdec.step.cache import KVCache
from specdec.step.forward_passes import Passes, Waited, alone
from specdec.step.tree import Draft
from specdec.target import Target

__all__ = [
    "BatchedSession",
    "Context",
    "DeviceStep",
    "DraftSession",
    "Drafter",
    "DrafterBase",
    "DrafterWrapper",
    "MergingSession",
    "Observation",
    "ReadbackSession",
]


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
        costs: what a forward costs by its rows; where nothing was measured, what a roofline supposes. For sizes that
            are chosen once.
        policy: what decides on rows, if anything does; a drafter that ``plans_rows`` always has one.
        isolated: whether the text depends on the rows proposed, as under ``reject`` and ``typical``. Then these must
            follow from prompt, seed and options alone: neither from what other sequences wrote nor from a clock.
        waited: seconds that drafting waited so far, for who measures what it takes.
        prediction: tokens that the answer is expected to be, from its beginning on; empty where nothing is expected.
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
    costs: CostCurve = field(default_factory=lambda: roofline("cpu"))
    policy: RowPolicy | None = None
    isolated: bool = False
    waited: Waited = field(default_factory=Waited)
    prediction: Sequence[int] = ()

    @property
    def root(self) -> int:
        """The last emitted token."""
        return self.tokens[-1]


@dataclass(slots=True, eq=False)
class Observation:
    """What became of a step, or of a chunk of the prompt.

    Attributes:
        draft: as proposed; None for a chunk of text that was run without asking the session, of the prompt or, where it
            rested, a token after it. Where drafts of several sessions were merged, rows that were
            left out are among its probes, and accepted rows of others are appended.
        path: accepted rows, root first, which are committed now; for a chunk all of its rows.
        tokens: the tokens emitted, bonus last; for a chunk its own tokens. They stand in ``Context.tokens`` already.
        scores: logits of the draft's scored rows; None for a chunk.
        taps: the drafter's ``taps``: layer -> [T, D], all rows of the block.
        readback: what the session's ``readback`` gave, copied from the device; None where it was not asked.
    """

    draft: Draft | None
    path: Sequence[int]
    tokens: Sequence[int]
    scores: Scores | None = None
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    readback: Sequence[int] | None = None

    def argmax(self, row: int) -> int:
        """The target's greedy token after a scored row of the draft."""
        assert self.scores is not None
        return self.scores.argmax(row)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStep:
    """A step on a device, before anything of it was copied to the host.

    Attributes:
        scores: logits of the draft's scored rows.
        taps: the drafter's ``taps``.
        last: int64 [1] on the device, the accepted row with which the path will end; None where the host decides.
        depth: int64 [1] on the device, its depth; None with ``last``.
        root: int64 [1] on the device, the token that follows it, the next step's root; None with ``last``.
    """

    scores: Scores
    taps: Mapping[int, torch.Tensor]
    last: torch.Tensor | None
    depth: torch.Tensor | None
    root: torch.Tensor | None


@runtime_checkable
class ReadbackSession(Protocol):
    """A session that reads numbers of every step, and has them come with the step's one copy from the device."""

    def readback(self, step: DeviceStep) -> torch.Tensor | None:
        """int64, what ``Observation.readback`` is to hold; on accelerators only, so ``observe`` may be without."""


@runtime_checkable
class MergingSession(Protocol):
    """A session whose drafts come from several drafters, which a trace tells apart."""

    def sources(self) -> Sequence[str]:
        """Of each row of the latest draft, the name of the drafter that proposed it; the root's means nothing."""


class BatchedSession:
    """A session that runs a model to draft, and in a batch has its passes run together with other sequences'."""

    def passes(self, row_budget: int) -> Passes[Draft]:
        """What ``propose`` does, as a generator that yields each :class:`specdec.step.forward_passes.Pass` and is sent
        its answer.

        Between two of them other sequences draft, so nothing may be left set up (a context manager) while it waits.
        """
        raise NotImplementedError

    @final
    def propose(self, row_budget: int) -> Draft:
        """As of any session, with each pass run by itself."""
        return alone(self.passes(row_budget))


class DraftSession(Protocol):
    """One sequence's drafting state."""

    def propose(self, row_budget: int) -> Draft:
        """A tree of at most ``row_budget`` rows, the root included; the root alone is a plain step."""

    def observe(self, seen: Observation) -> None:
        """Learn from a step that it proposed (or, if the drafter has taps, from text that it was not asked for)."""


class Drafter(Protocol):
    """A drafting strategy. Its attributes are all that the engine knows of it.

    :class:`DrafterBase` has defaults for them, :class:`DrafterWrapper` has those of the drafter inside.

    Attributes:
        name: the one that it is registered under.
        taps: hidden layers that sessions want back in ``observe``; ``FINAL`` is the last one, after the norm.
        needs_observe: False where the tokens in the context are all that sessions learn from; without taps they are
            then told nothing.
        needs_draft: False where sessions take a step as it was, whoever proposed its rows. Beside other drafters, in a
            ``union``, they are shown all of it, which is less work than to show them what became of their own draft.
        top_k: how many of each scored row's likeliest tokens sessions read. Where several processes share a step's
            rows, neither more than that many nor logits are there.
        proposes: False where drafts are the root alone, so that nothing has to be known of what rows cost.
        plans_rows: sessions choose their rows by ``context.policy.prices``; others' row budget the policy bounds.
        draws: False where no draft comes with a q, unless ``acceptance`` is ``reject``. Otherwise a text that is
            sampled depends on the rows proposed, and in a batch these must not depend on the other sequences.
        fixed_cost_rows: what drafting costs besides the rows that are verified, in rows of a small model: a tenth of a
            millisecond each. A rough guess.
    """

    name: str
    taps: frozenset[int]
    needs_observe: bool
    needs_draft: bool
    top_k: int
    proposes: bool
    plans_rows: bool
    draws: bool
    fixed_cost_rows: int

    def start(self, context: Context) -> DraftSession:
        """A session for a new sequence, called once the prompt is known and before it is run."""


class DrafterBase:
    """What a drafter written as a class with a config gets for free.

    ``Config`` is a frozen, keyword-only dataclass that checks itself; its fields are the drafter's options. For the
    other attributes see :class:`Drafter`.
    """

    name: str
    Config: ClassVar[type[Any]]
    taps: frozenset[int] = frozenset()
    needs_observe: bool = True
    needs_draft: bool = True
    top_k: int = 1
    proposes: bool = True
    plans_rows: bool = False
    draws: bool = True
    fixed_cost_rows: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "likeliest" in cls.__dict__:  # its name of before
            message = f"{cls.__name__}.likeliest is called top_k now; rename it"
            warnings.warn(message, SpecdecWarning, stacklevel=2)
            cls.top_k = cls.__dict__["likeliest"]

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config

    @classmethod
    def build(cls, config: Any, target: Target) -> DrafterBase:
        """Make the drafter for a target; override it where weights have to fit the target."""
        return cls(config)


class DrafterWrapper:
    """A drafter around another one, ``inner``, that the engine treats as it would treat that one.

    Override ``start`` to watch or to change what its sessions do.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.name = inner.name
        self.taps = inner.taps
        self.needs_observe = inner.needs_observe
        self.needs_draft = inner.needs_draft
        self.top_k = inner.top_k
        self.proposes = inner.proposes
        self.plans_rows = inner.plans_rows
        self.draws = inner.draws
        self.fixed_cost_rows = inner.fixed_cost_rows

    def start(self, context: Context) -> DraftSession:
        """A session of the drafter inside."""
        return self.inner.start(context)
