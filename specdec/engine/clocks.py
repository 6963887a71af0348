"""Clocks: the time of a step's drafting, taken by wrappers of a drafter, its session, and the session's passes.

A step itself takes no time. Its caller reads what was taken when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from specdec.drafter import (
    BatchedSession,
    Context,
    DeviceStep,
    Drafter,
    DrafterWrapper,
    DraftSession,
    MergingSession,
    Observation,
    ReadbackSession,
    RestingSession,
)
from specdec.step.first_time import FirstTimes
from specdec.step.forward_passes import Pass, Passes, resume
from specdec.step.tree import Draft

__all__ = ["Drafting", "TimedDrafter"]


@dataclass(slots=True)
class Drafting:
    """What one sequence's drafting took since it was last asked; the time inside ``with`` is added.

    Attributes:
        seconds: time of its session, an equal share of passes that it had in common with others.
        first_time: whether a graph was recorded or a kernel compiled meanwhile.
    """

    seconds: float = 0.0
    first_time: bool = False
    _seen: int = field(default=0, init=False, repr=False)
    _began: float = field(default=0.0, init=False, repr=False)

    def clear(self) -> None:
        """Begin anew."""
        self.seconds, self.first_time = 0.0, False

    def __enter__(self) -> None:
        self._seen, self._began = FirstTimes.seen, perf_counter()

    def __exit__(self, *_: object) -> None:
        self.add(perf_counter() - self._began, FirstTimes.seen != self._seen)

    def add(self, seconds: float, first_time: bool) -> None:
        """Add what was drafted elsewhere, in passes of several sequences."""
        self.seconds += seconds
        self.first_time |= first_time


class TimedDrafter(DrafterWrapper):
    """A drafter for one sequence, whose session is timed.

    Attributes:
        drafting: what its session took.
    """

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.drafting = Drafting()

    def start(self, context: Context) -> DraftSession:
        session = self.inner.start(context)
        if not all(callable(getattr(session, method, None)) for method in ("propose", "observe")):
            return session  # no session: its caller says so
        kind = _TimedBatched if isinstance(session, BatchedSession) else _Timed
        return kind(session, self.drafting)


class _Watched:
    """A session whose ``observe`` is timed, and ``readback`` where the inner session has one."""

    def __init__(self, inner: Any, drafting: Drafting) -> None:
        self.inner, self._drafting = inner, drafting
        if isinstance(inner, ReadbackSession):
            self.readback = self._readback
        if isinstance(inner, RestingSession):
            self.missed = inner.missed
        if isinstance(inner, MergingSession):
            self.sources = inner.sources

    def observe(self, seen: Observation) -> None:
        with self._drafting:
            self.inner.observe(seen)

    def _readback(self, step: DeviceStep) -> torch.Tensor | None:
        with self._drafting:
            found: torch.Tensor | None = self.inner.readback(step)
            return found


class _Timed(_Watched):
    """A session of two methods, timed."""

    def propose(self, row_budget: int) -> Draft:
        with self._drafting:
            draft: Draft = self.inner.propose(row_budget)
            return draft


class _TimedBatched(_Watched, BatchedSession):
    """A session that waits for passes, timed; others may draft while it waits."""

    def passes(self, row_budget: int) -> Passes[Draft]:
        passes, answer = self.inner.passes(row_budget), None
        while True:
            try:
                with self._drafting:
                    asked = resume(passes, answer)
            except StopIteration as done:
                draft: Draft = done.value
                return draft
            if isinstance(asked, Pass):
                asked = Pass(_TimedRun(asked.run), (asked.brought, self._drafting), asked.batch_invariant)
            try:
                answer = yield asked
            except Exception as error:
                answer = error


@dataclass(frozen=True, slots=True)
class _TimedRun:
    """The ``run`` of a pass, timed; equal where the runs are, so that passes are still run together."""

    inner: Callable[[Sequence[Any]], Sequence[Any]]

    def __call__(self, brought: Sequence[tuple[Any, Drafting]]) -> Sequence[Any]:
        seen, began = FirstTimes.seen, perf_counter()
        try:
            return self.inner([own for own, _ in brought])
        finally:
            seconds, first_time = (perf_counter() - began) / len(brought), FirstTimes.seen != seen
            for _, drafting in brought:
                drafting.add(seconds, first_time)

    def __str__(self) -> str:
        return str(self.inner)
