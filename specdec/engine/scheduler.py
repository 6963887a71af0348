"""Batch: many sequences at once, each exactly as by itself.

A step puts the rows of all sequences into one forward, flat and never padded; each sequence keeps its own cache, its
own drafting session and its own noise, and commits its own rows. So nothing of a text depends on its neighbours, on
their order, or on when it was admitted. (Numbers round alike whatever rows are beside them where the target is
``batch_invariant``; elsewhere as well as between a forward of one row and one of several.)

Prompts are admitted in order, as others end. What is drafted goes first, and what is left of ``step_rows`` takes chunks
of prompts. Drafting is each session's own; what it has a model compute is computed for all of them at once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Protocol

from specdec.drafting.registry import DrafterSpec, parse_drafter
from specdec.engine.decoding import Decoding, Learning
from specdec.engine.prefix_tree import PrefixTree
from specdec.engine.requests import Request
from specdec.engine.setup import Setup, cache_sizes
from specdec.errors import ConfigError
from specdec.results import Chunk, Generation, Statistics, Step
from specdec.settings.arguments import checked
from specdec.settings.copies import NotCopied

__all__ = ["Event", "Handle", "Scheduler"]

_STEP_ROWS = 256  # as many as keep a CPU's products fast; a larger chunk only makes the others wait


class Host(Setup, Protocol):
    """The attributes of an engine that a scheduler uses."""

    def prepare(self, request: Request) -> Request:
        """The request with its prompt as token ids, and every option checked and filled in."""

    def begin(self, request: Request) -> Decoding:
        """The generation of a request that was prepared."""

    @property
    def with_drafter(self) -> Callable[[DrafterSpec], Host]:
        """The same target with another drafter."""


@dataclass(slots=True, eq=False)
class Event:
    """The event of a request: a step, or its end by an error or a cancellation.

    Attributes:
        index: the request's place, its :class:`Handle`'s index.
        decoding: None where it could not even begin.
        step: the step; None with an error, and where it was cancelled.
        error: why it failed.
    """

    index: int
    decoding: Decoding | None
    step: Step | None
    error: Exception | None = None

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled before its end."""
        return self.step is None and self.error is None

    @property
    def last(self) -> bool:
        """Whether nothing more will come of it."""
        return self.step is None or (self.decoding is not None and self.decoding.finish_reason is not None)

    def generation(self) -> Generation:
        """The generation as it stands; its finish reason is ``error`` or ``cancelled`` where it ended by that."""
        done = Generation("", [], "", Statistics(), []) if self.decoding is None else self.decoding.result()
        if self.cancelled:
            return replace(done, finish_reason="cancelled")
        return done if self.error is None else replace(done, finish_reason="error", error=self.error)

    def chunk(self) -> Chunk:
        """The same as a piece of a stream."""
        if self.decoding is None or self.step is None:
            return Chunk("", [], None, "cancelled" if self.cancelled else "error", self.error)
        return self.decoding.chunk_of(self.step)


@dataclass(frozen=True, slots=True)
class Handle:
    """A request that was submitted; its events have the same ``index``."""

    index: int


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in line, prepared: whose drafter it has, the bytes that its cache may need, and the seconds that
    preparing it took."""

    index: int
    engine: Host
    request: Request
    bytes: int
    seconds: float


class Scheduler(NotCopied):
    """Admits requests in order, steps those that run together, and lets go of those that end.

    ``submit`` and ``cancel`` may be called from any thread, while another one calls ``step``. A request that fails ends
    alone: where the shared forward raises, each sequence's rows are run again by themselves, and those that raise again
    end with that error.

    Args:
        engine: whose target they share, and whose drafter those requests have that name none. A drafter that requests
            name is made with the first of them, and kept.
        requests: taken one at a time, when there is room, before those that are submitted; an iterator that had none is
            asked again after each step.
        batch: most sequences at once.
        step_rows: most rows of one forward, all drafts and chunks of prompts together; None takes 256, or the engine's
            ``max_rows`` where that is larger. A draft that finds no room waits for the next forward as it is.
        cache_bytes: most bytes that the target's caches may come to hold together, each counted as what its text may
            need at most; None is no bound. Where caches are in pages, what the device has left bounds them as well:
            requests that may need more wait.

    Raises:
        ConfigError: a size that is not positive, or a ``step_rows`` that cannot hold a draft.
    """

    instead = "make another Scheduler of the engine"

    @checked
    def __init__(
        self,
        engine: Host,
        requests: Iterable[Request] = (),
        *,
        batch: int = 8,
        step_rows: int | None = None,
        cache_bytes: int | None = None,
        prefixes: PrefixTree | None = None,
    ) -> None:
        if step_rows is not None and step_rows < engine.max_rows:
            raise ConfigError(
                f"step_rows is {step_rows}, and one draft may have max_rows = {engine.max_rows} rows; "
                "give at least as many, or an engine with a smaller max_rows"
            )
        self._engine, self._batch = engine, batch
        self._step_rows = step_rows or max(_STEP_ROWS, engine.max_rows)
        self._cache_bytes, self._prefixes = cache_bytes, prefixes
        self._requests, self._numbers = iter(requests), itertools.count()
        self._engines: dict[str | int, Host] = {}  # by drafter
        self._making = Lock()  # of these
        self._lock = Lock()  # of what other threads change: the next two
        self._submitted: deque[_Waiting] = deque()
        self._cancelled: set[int] = set()
        self._next: _Waiting | None = None
        self._running: dict[Decoding, _Waiting] = {}  # as they were admitted, with what they were before
        self._learning = Learning(engine)

    def submit(self, request: Request) -> Handle:
        """Put a request in line; it joins the others at the next step that has room for it.

        The prompt is encoded and a drafter that is new is made here, so not in a step, and by the thread that calls.

        Raises:
            PromptError: the prompt is empty, too long, or holds tokens outside the vocabulary.
            ConfigError: an option that does not fit, an unknown drafter, or a cache that may need more than
                ``cache_bytes``.
            CheckpointError: the drafter's weights cannot be loaded, or do not fit the target.
        """
        waiting = self._prepared(next(self._numbers), request)
        with self._lock:  # a step may be letting go of others, and puts another queue in the place of this one
            self._submitted.append(waiting)
        return Handle(waiting.index)

    def cancel(self, handle: Handle) -> None:
        """End a request at the next step, whose events say so; one that has ended already is left as it is."""
        with self._lock:
            self._cancelled.add(handle.index)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing that was submitted waits; to be asked between steps, by their thread."""
        return not (self._running or self._submitted or self._next)

    def step(self) -> list[Event]:
        """Admit requests that there is room for, and run one forward of all sequences; returns their events."""
        target = self._engine.target
        with target.active():
            events = self._drop_cancelled() + self._admit()
            for decoding, outcome in self._learning.step([*self._running], self._step_rows):
                events.append(self._event(decoding, outcome))
            return events

    def _event(self, decoding: Decoding, outcome: Step | Exception) -> Event:
        """The event of a generation's step; an ended one is removed."""
        index = self._running[decoding].index
        if isinstance(outcome, Exception) or decoding.finish_reason is not None:
            del self._running[decoding]
        if isinstance(outcome, Exception):
            return Event(index, decoding, None, outcome)
        return Event(index, decoding, outcome)

    def run(self) -> Iterator[list[Event]]:
        """Yield the events of each step until no sequence runs and no request waits."""
        while (events := self.step()) or self._running:  # a step that only ran chunks of prompts has no events
            yield events

    @property
    def cache_bytes(self) -> int:
        """Bytes that the caches of the running sequences hold now."""
        return sum(decoding.sequence.context.cache.nbytes for decoding in self._running)

    def _drop_cancelled(self) -> list[Event]:
        """Remove requests that were cancelled since the last step; returns their events."""
        if not self._cancelled:
            return []
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
            dropped = [one.index for one in self._submitted if one.index in cancelled]
            self._submitted = deque(one for one in self._submitted if one.index not in cancelled)
        if self._next is not None and self._next.index in cancelled:
            dropped.append(self._next.index)
            self._next = None
        ended = [(decoding, one.index) for decoding, one in self._running.items() if one.index in cancelled]
        for decoding, _ in ended:
            del self._running[decoding]
        return [Event(index, decoding, None) for decoding, index in ended] + [
            Event(index, None, None) for index in dropped
        ]

    def _admit(self) -> list[Event]:
        """Begin waiting requests in order while there is room; returns the events of those that fail."""
        failed: list[Event] = []
        while len(self._running) < self._batch:
            if self._next is None and not self._look(failed):
                break
            waiting = self._next
            assert waiting is not None
            held = sum(one.bytes for one in self._running.values())
            if not self._fits(waiting, held):
                break
            self._next, began = None, perf_counter()
            self._share(held + waiting.bytes)
            try:
                decoding = waiting.engine.begin(waiting.request)
            except Exception as error:
                failed.append(Event(waiting.index, None, None, error))
            else:
                decoding.stats.seconds.prefill += waiting.seconds + perf_counter() - began
                self._running[decoding] = waiting
        self._share(sum(one.bytes for one in self._running.values()))
        return failed

    def _fits(self, waiting: _Waiting, held: int) -> bool:
        """Whether a text's cache, and those of the running texts, find room even if all become as long as they may.

        So no text is ended, or run again, because others grew. A text that is alone is admitted in any case, as it may
        end sooner.
        """
        if self._cache_bytes is not None and held + waiting.bytes > self._cache_bytes:
            return False
        room = self._engine.target.cache_room() if self._running else None
        if room is None:
            return True
        held_now = ((decoding.sequence.context.cache, one.bytes) for decoding, one in self._running.items())
        growth = sum(max(0, most - cache.nbytes) for cache, most in held_now)
        return bool(growth + waiting.bytes <= room)

    def _share(self, held: int) -> None:
        """Have the kept beginnings take no more than running texts leave of ``cache_bytes``."""
        if self._prefixes is not None and self._cache_bytes is not None:
            self._prefixes.bound(self._cache_bytes - held)

    def _look(self, failed: list[Event]) -> bool:
        """Prepare the next request, adding those that fail to ``failed``; False if there is none."""
        for request in self._requests:
            index = next(self._numbers)
            try:
                self._next = self._prepared(index, request)
            except Exception as error:
                failed.append(Event(index, None, None, error))
            else:
                return True
        with self._lock:
            self._next = self._submitted.popleft() if self._submitted else None
        return self._next is not None

    def _prepared(self, index: int, request: Request) -> _Waiting:
        """A prepared request, ready to be admitted."""
        began = perf_counter()
        engine = self._engine_of(request.drafter)
        request = engine.prepare(replace(request, drafter=None))
        size = self._bytes(len(request.prompt), request.max_new_tokens)
        return _Waiting(index, engine, request, size, perf_counter() - began)

    def _engine_of(self, drafter: DrafterSpec | None) -> Host:
        """The engine with this drafter; requests that name the same drafter share it."""
        if drafter is None:
            return self._engine
        key = repr(parse_drafter(drafter)) if isinstance(drafter, str | Mapping) else id(drafter)
        with self._making:
            found = self._engines.get(key)
            if found is None:
                found = self._engines[key] = self._engine.with_drafter(drafter)
        return found

    def _bytes(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Most bytes of the cache of such a text; 0 where nothing bounds them.

        Raises:
            ConfigError: the text may need more than ``cache_bytes``.
        """
        target = self._engine.target
        if self._cache_bytes is None and not target.pages:
            return 0
        capacity, rows = cache_sizes(self._engine, prompt_tokens, max_new_tokens)
        size = target.most_bytes(capacity=capacity, rows=rows, drafted=self._engine.max_rows)
        if self._cache_bytes is not None and size > self._cache_bytes:
            raise ConfigError(
                f"a text of up to {capacity} tokens may need {size} bytes of cache, and cache_bytes is "
                f"{self._cache_bytes}; lower max_new_tokens or raise cache_bytes"
            )
        return size
