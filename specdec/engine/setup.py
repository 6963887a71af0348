"""Setup: what generations and their sequences take from their engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from specdec.costs.curve import CostCurve
from specdec.costs.fallback import Fallback
from specdec.costs.live_curve import LiveCosts
from specdec.costs.policy import RowPolicy
from specdec.drafter import Context, Drafter
from specdec.engine.requests import Request
from specdec.sampling.sampler import Sampler
from specdec.step.cache import KVCache
from specdec.target import Target

__all__ = ["Pricing", "Setup", "cache_sizes", "context_of", "pricing_of"]


class Setup(Protocol):
    """The attributes of an :class:`specdec.engine.engine.Engine` that its generations use."""

    target: Target
    tokenizer: Any
    drafter: Drafter
    max_rows: int
    costs: CostCurve
    live: LiveCosts | None
    fallback: Fallback | None
    step_kinds: set[Any]

    @property
    def chunk_rows(self) -> int:
        """Most tokens of a prompt that go through one forward."""

    def row_policy(self, *, steady: bool = False) -> RowPolicy | None:
        """The row policy of a new sequence, or None; ``steady``: by the measured curve, not the live one."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """The costs of rows that a sequence's drafting session gets; see :class:`specdec.drafter.Context`."""

    policy: RowPolicy | None
    costs: CostCurve
    isolated: bool


def cache_sizes(engine: Setup, prompt_tokens: int, max_new_tokens: int) -> tuple[int, int]:
    """Most tokens of a text, prompt and all, and most rows of one of its forwards."""
    end = min(prompt_tokens + max_new_tokens, engine.target.context_length)
    return end, max(engine.max_rows, min(engine.chunk_rows, prompt_tokens))


def context_of(
    engine: Setup, request: Request, pricing: Pricing, sampler: Sampler, cache: KVCache, capacity: int
) -> Context:
    """What a sequence's drafting session sees; ``capacity``: most tokens of its text."""
    return Context(
        target=engine.target,
        cache=cache,
        tokens=sampler.tokens,
        prompt_length=len(sampler.tokens),
        remaining=capacity - len(sampler.tokens),
        max_rows=request.max_rows or engine.max_rows,
        sampling=sampler.params,
        noise=sampler.noise,
        rng=random.Random(sampler.params.seed),
        costs=pricing.costs,
        policy=pricing.policy,
        isolated=pricing.isolated,
        prediction=cast(Sequence[int], request.prediction or ()),
    )


def pricing_of(engine: Setup, request: Request) -> Pricing:
    """The costs of rows that a sequence's drafting session gets."""
    sampling, live = request.sampling, engine.live
    assert sampling is not None
    draws = sampling.temperature > 0 if request.sample is None else request.sample
    # Under ``reject`` the text at a seed depends on the proposed rows. It must not depend on other sequences or on the
    # time of forwards, so the rows must not either.
    rejects = sampling.acceptance == "reject" or (sampling.acceptance == "auto" and engine.drafter.draws)
    isolated = sampling.acceptance == "typical" or (draws and rejects)
    policy = engine.row_policy(steady=isolated)
    steady = isolated or policy is None
    return Pricing(policy, engine.costs if steady or live is None else live.now, isolated)
