"""The engine's thread. It alone steps the scheduler; it receives requests and cancellations and sends updates.

Commands wait in a mailbox under a condition variable, on which the idle thread sleeps. The updates of a step go to the
event loop in one call, for any number of sequences.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from time import perf_counter
from typing import Any

from specdec.engine.requests import Request
from specdec.engine.scheduler import Event, Handle, Scheduler
from specdec.results import Statistics, Step, TokenLogprobs
from specdec.serve.errors import told_to_client

__all__ = ["EngineThread", "Inbox", "Update"]

_log = logging.getLogger("specdec.serve")


@dataclass(frozen=True, slots=True)
class Update:
    """The result of a step for one sequence; a sequence's last update has a finish reason or an error.

    Attributes:
        at: time of the update, in seconds of ``perf_counter``.
        step: the step's tokens and tree; None where there is an error.
        logprobs: log-probabilities of the step's tokens, where the request asked for them.
        stats: statistics of the whole generation, in its last update.
        error: the exception that ended the sequence.
        text: the text that the step completes, where stop strings had it decoded already; else None.
    """

    at: float
    step: Step | None
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    stats: Statistics | None = None
    error: Exception | None = None
    text: str | None = None


class Inbox:
    """The updates of one HTTP request's sequences, which the coroutine that answers it awaits."""

    def __init__(self) -> None:
        self._updates: list[tuple[int, Update]] = []
        self._waits: asyncio.Future[None] | None = None

    def put(self, index: int, update: Update) -> None:
        """Add an update of the sequence ``index``. Called on the event loop."""
        self._updates.append((index, update))
        if self._waits is not None and not self._waits.done():
            self._waits.set_result(None)

    async def take(self) -> list[tuple[int, Update]]:
        """Wait for at least one update and return all that are there. One coroutine alone may await this."""
        if not self._updates:
            self._waits = asyncio.get_running_loop().create_future()
            await self._waits
        taken, self._updates = self._updates, []
        return taken


@dataclass(slots=True, eq=False)
class Submitted:
    """A sequence of an HTTP request, from its submission to its last update."""

    inbox: Inbox
    index: int
    request: Request
    handle: Handle | None = None


class EngineThread:
    """Decodes requests in a thread of its own.

    Its methods are called on the event loop.

    Args:
        make_scheduler: makes an empty scheduler; called again after a whole step has failed.
        on_events: called in the thread with each step's events, to count them.

    Attributes:
        unfinished: the sequences that have not had their last update.
        loop: the event loop; None until the thread starts.
        rests: whether the thread is idle.
    """

    def __init__(
        self, make_scheduler: Callable[[], Scheduler], on_events: Callable[[list[Event], Scheduler], None] | None = None
    ) -> None:
        self._make, self._on_events = make_scheduler, on_events
        self._wake = Condition()
        self._mail: list[tuple[str, Any]] = []
        self._stopped = False
        self._thread = Thread(target=self._run, name="specdec-engine", daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.unfinished: set[Submitted] = set()
        self.rests = False

    def start(self) -> None:
        """Start the thread. Called on the event loop that receives the updates."""
        self.loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive() and not self._stopped

    def submit(self, request: Request, inbox: Inbox, index: int) -> Submitted:
        """Queue a request for decoding; its updates go to the inbox with that index."""
        sequence = Submitted(inbox, index, request)
        self.unfinished.add(sequence)
        self._send("submit", sequence)
        return sequence

    def cancel(self, sequence: Submitted) -> bool:
        """End a sequence at the next step. It gets no further update. Returns False where it had already ended."""
        if sequence not in self.unfinished:
            return False
        self.unfinished.discard(sequence)
        self._send("cancel", sequence)
        return True

    def abort(self, error: Exception) -> None:
        """End all sequences with an error."""
        for sequence in list(self.unfinished):
            self.cancel(sequence)
            sequence.inbox.put(sequence.index, Update(perf_counter(), None, error=error))

    async def close(self, *, waits: bool = True) -> None:
        """Stop the thread after its current step, and wait for that."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        if waits:
            await asyncio.to_thread(self._thread.join)

    def _send(self, kind: str, sequence: Submitted) -> None:
        with self._wake:
            self._mail.append((kind, sequence))
            self.rests = False
            self._wake.notify()

    def _run(self) -> None:
        scheduler, running = self._make(), dict[int, Submitted]()
        while True:
            with self._wake:
                while scheduler.idle and not self._mail and not self._stopped:
                    self.rests = True
                    self._wake.wait()
                mail, self._mail = self._mail, []
                if self._stopped:
                    return
            for kind, sequence in mail:
                if kind == "submit":
                    self._begin(scheduler, running, sequence)
                elif sequence.handle is not None and running.pop(sequence.handle.index, None) is not None:
                    scheduler.cancel(sequence.handle)
            try:
                events = scheduler.step()
                if self._on_events is not None:
                    self._on_events(events, scheduler)
            except Exception as error:  # a fault of the scheduler or the model; a sequence's own is an event
                _log.exception("a step failed; all running requests end with an error")
                failed, scheduler = list(running.values()), self._make()
                running = {}
                self._post([(one, Update(perf_counter(), None, error=error)) for one in failed])
                continue
            self._post([pair for event in events for pair in self._update(running, event)])

    def _begin(self, scheduler: Scheduler, running: dict[int, Submitted], sequence: Submitted) -> None:
        try:
            sequence.handle = scheduler.submit(sequence.request)
        except Exception as error:
            self._post([(sequence, Update(perf_counter(), None, error=error))])
        else:
            running[sequence.handle.index] = sequence

    def _update(self, running: dict[int, Submitted], event: Event) -> list[tuple[Submitted, Update]]:
        """The update that an event makes for its sequence; an empty list where that was cancelled."""
        sequence = running.get(event.index)
        if sequence is None:
            return []
        if event.last:
            del running[event.index]
        if event.step is None:
            return [(sequence, Update(perf_counter(), None, error=event.error))]
        decoding = event.decoding
        assert decoding is not None
        logprobs = decoding.logprobs[-len(event.step.tokens) :] if decoding.logprobs else ()
        stats = decoding.stats if event.last else None
        text = decoding.chunk_of(event.step).text if sequence.request.stop else None
        return [(sequence, Update(perf_counter(), event.step, decoding.finish_reason, logprobs, stats, text=text))]

    def _post(self, updates: list[tuple[Submitted, Update]]) -> None:
        for _, update in updates:
            if update.error is not None and told_to_client(update.error).status >= 500:
                _log.error("a request failed: %s", update.error, exc_info=update.error)
        if updates and self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._hand_out, updates)

    def _hand_out(self, updates: list[tuple[Submitted, Update]]) -> None:
        for sequence, update in updates:
            if sequence not in self.unfinished:
                continue  # it was cancelled in the meantime
            if update.finish_reason is not None or update.error is not None:
                self.unfinished.discard(sequence)
            sequence.inbox.put(sequence.index, update)
