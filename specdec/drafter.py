"""Drafter: the interface of a drafting strategy, which proposes trees and observes what became of them.

A *drafter* holds what sequences share: options, weights, a datastore. A *session* holds one sequence's state and has
two methods. Exactness does not depend on a drafter: whatever a session proposes, the engine emits the target's text.
:class:`BatchedSession` and :class:`ReadbackSession` are further interfaces for drafters with a model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import torch

from specdec.costs.curve import CostCurve, roofline
from specdec.costs.policy import RowPolicy
from specdec.errors import ConfigError
from specdec.sampling.noise import Noise
from specdec.settings.sampling_params import SamplingParams
from specdec.step.cache import KVCache
from specdec.step.forward_passes import Passes, alone
from specdec.step.step_output import StepOutput
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
    "RestingSession",
    "warm_up",
]


@dataclass(slots=True, eq=False)
class Context:
    """A session's view of its sequence; it changes as the sequence goes on.

    Attributes:
        target: the model; its layers may be run into scratch slots (see Kangaroo).
        cache: the target's cache; ``cache.length == len(tokens) - 1`` between steps. Only the engine commits.
        tokens: prompt and emitted tokens; the last one is the root. Read only.
        prompt_length: number of tokens of the prompt.
        remaining: tokens that may still be emitted; a draft deeper than ``remaining - 1`` is partly wasted.
        max_rows: most rows of a draft, the root included.
        sampling: how tokens are chosen.
        noise: for drafts that are sampled: use stream ``Noise.DRAFT`` at position ``len(tokens)``.
        rng: seeded by ``sampling.seed``, for random choices that are not draws from a distribution.
        costs: cost curve of the target's forwards, or a roofline where nothing was measured; for sizes that are chosen
            once.
        policy: the row policy, or None; a drafter that ``plans_rows`` always has one.
        isolated: whether the text depends on the proposed rows, as under ``reject`` and ``typical``. Then rows must
            depend on prompt, seed and options only, not on other sequences or on a clock.
        prediction: the expected tokens of the answer, from its beginning; empty without a prediction.
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
    costs: CostCurve = field(default_factory=roofline)
    policy: RowPolicy | None = None
    isolated: bool = False
    prediction: Sequence[int] = ()

    @property
    def root(self) -> int:
        """The last emitted token."""
        return self.tokens[-1]


@dataclass(slots=True, eq=False)
class Observation:
    """The outcome of a step, or of a chunk of text that ran without a draft.

    Attributes:
        draft: as proposed; None for a chunk of the prompt, and for a plain step while drafting rests. Where drafts of
            several sessions were merged, rows that were left out are among its probes, and accepted rows of other
            sessions are appended.
        path: accepted rows, root first, which are committed now; for a chunk all of its rows.
        tokens: the emitted tokens, bonus last; for a chunk its tokens. ``Context.tokens`` holds them already.
        scores: what the forward gave of the draft's scored rows; None for a chunk.
        taps: the drafter's ``taps``: layer -> [T, D], all rows of the block.
        readback: the result of the session's ``readback``, copied from the device; None if it was not called.
    """

    draft: Draft | None
    path: Sequence[int]
    tokens: Sequence[int]
    scores: StepOutput | None = None
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    readback: Sequence[int] | None = None

    def argmax(self, row: int) -> int:
        """The target's greedy token after a scored row of the draft."""
        assert self.scores is not None
        return self.scores.argmax(row)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceStep:
    """A step's results on a device, before they are copied to the host.

    Attributes:
        output: of the draft's rows; ``output.hidden`` has the drafter's ``taps``.
        last: int64 [1] on the device, the last accepted row.
        depth: int64 [1] on the device, depth of the last accepted row.
        root: int64 [1] on the device, the bonus token, which is the next step's root.
    """

    output: StepOutput
    last: torch.Tensor
    depth: torch.Tensor
    root: torch.Tensor


@runtime_checkable
class ReadbackSession(Protocol):
    """A session that reads numbers from the device in every step; they come with the step's one copy."""

    def readback(self, step: DeviceStep) -> torch.Tensor | None:
        """An int64 tensor for ``Observation.readback``. It is called on accelerators only, so that may be None."""


@runtime_checkable
class RestingSession(Protocol):
    """A session with taps that can do without the hidden states of text that ran while drafting rested for long.

    That text is this one's, or one of whose beginning this one goes on (a prefix cache). Of other sessions the engine
    asks the target for them in every step, though they propose nothing, and runs a beginning that lacks them anew.
    """

    def missed(self) -> None:
        """Be told, before the next ``propose`` or ``observe``, that text ran whose hidden states are not known.

        The session is not shown that text, whose end is the root: what it keeps of the target's states goes on with the
        next observation.
        """


@runtime_checkable
class MergingSession(Protocol):
    """A session whose drafts come from several drafters, which a trace names."""

    def sources(self) -> Sequence[str]:
        """Per row of the latest draft the name of the drafter that proposed it; the root's is not used."""


class BatchedSession:
    """A session that runs a model to draft; in a batch its passes are run together with other sequences'."""

    def passes(self, row_budget: int) -> Passes[Draft]:
        """``propose`` as a generator that yields each :class:`specdec.step.forward_passes.Pass` and is sent its output.

        Other sequences draft between two passes, so no context manager may be left open across a ``yield``.
        """
        raise NotImplementedError

    @final
    def propose(self, row_budget: int) -> Draft:
        """As :meth:`DraftSession.propose`, with passes run one by one."""
        return alone(self.passes(row_budget))


class DraftSession(Protocol):
    """One sequence's drafting state."""

    def propose(self, row_budget: int) -> Draft:
        """A tree of at most ``row_budget`` rows, the root included; the root alone is a plain step."""

    def observe(self, seen: Observation) -> None:
        """Learn from a step the session proposed or, if the drafter has taps, from text that ran without a draft."""


class Drafter(Protocol):
    """A drafting strategy. The engine reads these attributes and calls ``start``.

    :class:`DrafterBase` has defaults for the attributes, :class:`DrafterWrapper` copies those of the inner drafter.

    Attributes:
        name: the name it is registered under.
        taps: hidden layers that sessions read in ``observe``; ``FINAL`` is the last layer after the norm.
        needs_observe: False if sessions learn from the tokens in the context only; without taps ``observe`` is then
            not called.
        needs_draft: False if sessions learn from a step's rows whichever drafter proposed them. In a ``union`` they
            then observe the whole step, which is cheaper than to cut out their own draft.
        top_k: how many of each scored row's likeliest tokens sessions read. Where several processes share a step's
            rows, sessions receive these tokens and no logits.
        proposes: False if drafts are the root alone, so that no cost curve is needed.
        plans_rows: True if sessions choose their rows by ``context.policy.prices``; otherwise the policy sets their
            row budget.
        draws: False if no draft has a q unless ``acceptance`` is ``reject``. Otherwise sampled text depends on the
            proposed rows, and in a batch these must not depend on the other sequences.
        fixed_cost_rows: fixed cost of drafting, besides the verified rows, in units of a tenth of a millisecond; a
            rough guess.
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
    """Base class of drafters with a config, with defaults for a drafter's attributes, see :class:`Drafter`.

    ``Config`` is a frozen, keyword-only dataclass that checks itself; its fields are the drafter's options.

    Raises:
        ConfigError: no config is given, and the class has no ``Config``.
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

    def __init__(self, config: Any = None) -> None:
        if config is None and not hasattr(self, "Config"):
            raise ConfigError(
                f"drafter {type(self).__name__} has no Config; give the class one, a frozen dataclass whose fields are "
                "its options, empty where it has none"
            )
        self.config = self.Config() if config is None else config

    @classmethod
    def build(cls, config: Any, target: Target) -> DrafterBase:
        """Make the drafter for a target; override it to load weights that fit the target."""
        return cls(config)

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        """Compile and record the drafter's passes, for up to ``rows`` rows of each of ``sequences`` sequences."""


class DrafterWrapper:
    """A drafter around another one, ``inner``, with the same attributes.

    Override ``start`` to watch or change what the inner drafter's sessions do.
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

    def warm_up(self, target: Target, rows: int, sequences: int) -> None:
        """As :meth:`DrafterBase.warm_up`."""
        warm_up(self.inner, target, rows, sequences)

    def start(self, context: Context) -> DraftSession:
        """A session of the inner drafter."""
        return self.inner.start(context)


def warm_up(drafter: Drafter, target: Target, rows: int, sequences: int) -> None:
    """As :meth:`DrafterBase.warm_up`; a drafter without that method has nothing to do."""
    own: Any = getattr(drafter, "warm_up", None)
    if callable(own):
        own(target, rows, sequences)
