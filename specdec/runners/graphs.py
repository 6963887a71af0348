"""CUDA graphs of steps: hundreds of launches from Python are recorded once and replayed by one launch.

A graph repeats its launches with the same arguments, so everything that differs between steps is in memory at fixed
addresses: the rows' arrays (:mod:`specdec.runners.packed_step`), which hold tokens, positions and the addresses of
the sequence's cache, or of the list of its pages; and hidden states, of rows that already passed some layers. So one
graph serves texts of every length, growing caches, and any number of caches. Graphs are recorded per bucket of rows,
bucket of the tree's rows, and range of layers. Padding rows of a bucket are computed, but store nothing and are
not read. In a batch each sequence has a bucket.
"""

from __future__ import annotations

import gc
import math
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeGuard
from weakref import WeakSet

import torch

from specdec.errors import SpecdecWarning, first_line
from specdec.runners.rows import Rows
from specdec.runners.sent_rows import SentRows
from specdec.step import device_copies
from specdec.step.first_time import FirstTimes

__all__ = ["LOGITS", "PICKED", "CudaRecorder", "Recorder", "StepGraphs", "StepInputs"]

Outcome = tuple[torch.Tensor, dict[int, torch.Tensor]]  # of layers: what is behind the last one, and the taps
CosSin = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # cosines, sines, and which of them turn each row


LOGITS, PICKED = -2, -3
"""In the place of taps: the logits [B, V], and int64 [B, 5] each row's argmax, as by
:func:`specdec.step.step_output.finite_argmax`, the target's draw, and of its sequence the last row that is accepted,
its depth, and the target's token after that. Where the first is asked for, the last norm, the head and these are a part
of the step."""


class Recorder(Protocol):
    """Keeps work on a device, to be done again.

    Attributes:
        lock: held by whoever does such work again, until its outcome is copied: all of it shares memory, and threads
            share its inputs.
    """

    lock: threading.Lock

    def record(self, work: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        """Where the work puts its outcome, not computed yet, and what computes it there, from what is there then."""


class CudaRecorder:
    """By CUDA graphs of one memory pool: none runs beside another, and outcomes are copied before the next one runs."""

    _one: ClassVar[threading.Lock] = threading.Lock()  # torch waits for the device before it captures: none may be then

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: WeakSet[Any] = WeakSet()  # those of the pool; with its last one, torch ends the pool

    def record(self, work: Callable[[], Outcome]) -> tuple[Outcome, Callable[[], None]]:
        with self._one, torch.cuda.device(self._device), _uncollected():
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                stream: Any = torch.cuda.Stream
                self._stream = stream()
            here = torch.cuda.current_stream()
            self._stream.wait_stream(here)
            # Torch's own context would leave its stream in the place of this one where a capture fails to end.
            with torch.cuda.stream(self._stream):
                try:
                    for _ in range(2):  # kernels are compiled, and libraries take their workspaces
                        work()
                finally:
                    here.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                try:
                    # Other threads may go on to allocate meanwhile.
                    with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                        outcome = work()
                except BaseException:
                    # Where it failed to end, the generator still takes itself for captured, and would draw nothing.
                    generator = torch.cuda.default_generators[torch.cuda.current_device()]
                    generator.graphsafe_set_state(generator.clone_state())
                    raise
            self._graphs.add(graph)
        return outcome, graph.replay


@contextmanager
def _uncollected() -> Iterator[None]:
    """While inside, garbage waits: a graph of before that is destroyed in the midst of a capture makes it fail."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class StepInputs:
    """The inputs of one bucket's graphs, at fixed addresses; it takes the rows' place while graphs are recorded.

    Attributes:
        hidden: [B, D]; None until a step brings its rows' hidden states.
        cos_sin: cosines and sines [B, d] of the rows, and ``order``; None until a step brings them.
        order: int64 [B], the rows' numbers.
        windows: window of each layer's attention.
        backend: attention backend; graphs have their own attention kernels.
    """

    backend = "auto"

    def __init__(self, rows: SentRows) -> None:
        count = rows.shapes["closure"][..., 0].size
        self.hidden: torch.Tensor | None = None
        self.cos_sin: CosSin | None = None
        self.order = torch.arange(count, device=rows.sent["step"].device)
        self.windows = [group.window for group in rows.parts[0].cache.group_of]
        self._bytes = torch.empty_like(rows.sent["step"])
        self._where = device_copies.views(self._bytes, rows.shapes)
        self.parts, self.begins, self.ends = (self,), 0, count

    def where(self) -> dict[str, torch.Tensor]:
        """As of a sequence."""
        return self._where

    def fill(self, hidden: torch.Tensor | None, rows: SentRows, cos_sin: CosSin | None) -> None:
        """Have these rows; None for what the graph itself looks up."""
        spread = rows.sent["spread"] if len(rows.parts) > 1 else None
        self._bytes.copy_(rows.sent["step"])
        # Tokens that are on the device only, where they are looked up or walked through.
        if rows.step.late and (hidden is None or rows.step.wanted.decides):
            _put(rows.tokens[0], self._where["tokens"].view(-1), spread)
        if hidden is not None:
            if self.hidden is None:
                self.hidden = hidden.new_zeros(len(self.order), hidden.shape[1])
            _put(hidden, self.hidden, spread)
        if cos_sin is not None:
            cos, sin, at = cos_sin
            if self.cos_sin is None:
                cosines, sines = (values.new_zeros(len(self.order), values.shape[1]) for values in (cos, sin))
                self.cos_sin = cosines, sines, self.order
            at = at if spread is None else at.index_select(0, spread)
            for own, values in zip(self.cos_sin[:2], (cos, sin), strict=True):
                torch.index_select(values, 0, at, out=own[: len(at)])


def _put(rows: torch.Tensor, there: torch.Tensor, spread: torch.Tensor | None) -> None:
    """Copy rows to a graph's input, those of a batch to their places."""
    if spread is None:
        there[: len(rows)].copy_(rows)
    else:
        torch.index_select(rows, 0, spread, out=there)


def _own(every: torch.Tensor, rows: SentRows) -> torch.Tensor:
    """A copy of these rows of a graph's output, as the next replay overwrites the output."""
    if "packed" not in rows.sent:
        return every[: rows.rows].clone()
    return every.index_select(0, rows.sent["packed"])


class StepGraphs:
    """Graphs of one executor, or of a head, each recorded when its step is first run.

    Args:
        recorder: keeps the graphs.
        layers: runs [B, D] of the rows of ``StepInputs`` through layers [first, last), and returns it with the taps.

    Attributes:
        failed: why graphs are no longer used, or None.
        kind: a further key of graphs; graphs of other kinds are kept, as they share the recorder's memory.
    """

    def __init__(self, recorder: Recorder, layers: Callable[..., Outcome]) -> None:
        self._recorder, self._layers = recorder, layers
        self._inputs: dict[tuple[int, ...], StepInputs] = {}
        self._graphs: dict[Any, tuple[Outcome, Callable[[], None]]] = {}
        self._lock = recorder.lock
        self.failed: str | None = None
        self.kind = 0

    def takes(self, rows: Rows) -> TypeGuard[SentRows]:
        """Whether rows are run by a graph: they come ``again`` and attention is not chosen by name."""
        there = isinstance(rows, SentRows) and rows.again
        return there and rows.backend == "auto" and self.failed is None

    def run(
        self,
        hidden: torch.Tensor | None,
        rows: SentRows,
        first: int,
        last: int,
        taps: Collection[int],
        cos_sin: CosSin | None,
    ) -> Outcome | None:
        """As ``layers``; None where the step cannot be recorded, with a warning that has the reason.

        ``layers`` gets None for ``hidden``, and for ``cos_sin``, where it is None here, and looks them up.
        """
        # Caches in pages, and others, have their own kernels.
        sizes = (*rows.shapes["closure"].shape, rows.shapes["table"].shape[-1])
        # A tap of the last norm is the step's where the head is.
        wanted = frozenset(tap for tap in taps if first <= tap < last or (tap < 0 and LOGITS in taps))
        with self._lock:
            if sizes not in self._inputs:
                self._inputs[sizes] = StepInputs(rows)
            brought, turned = hidden is not None, cos_sin is not None
            inputs, key = self._inputs[sizes], (sizes, first, last, wanted, self.kind, brought, turned)
            inputs.fill(hidden, rows, cos_sin)
            if key not in self._graphs:
                try:
                    with FirstTimes.during():
                        self._graphs[key] = self._recorder.record(
                            lambda: self._layers(
                                inputs.hidden if brought else None,
                                inputs,
                                first,
                                last,
                                wanted,
                                inputs.cos_sin if turned else None,
                            )
                        )
                except Exception as error:  # the driver's, the allocator's and the compiler's share no class but this
                    self.failed = f"{type(error).__name__}: {first_line(error)}"
                    warnings.warn(
                        f"steps are launched kernel by kernel, more slowly, as no CUDA graph of {len(inputs.order)} "
                        f"rows can be recorded: {self.failed}",
                        SpecdecWarning,
                        stacklevel=2,
                    )
                    return None
            (output, found), replay = self._graphs[key]
            replay()
            return _own(output, rows), {tap: _own(every, rows) for tap, every in found.items()}

    @contextmanager
    def aside(
        self, hidden: torch.Tensor | None, rows: SentRows, cos_sin: CosSin | None
    ) -> Iterator[Callable[..., Callable[[], None]]]:
        """Record steps of these rows that are for no text: a function that records work, and returns what does it.

        No other step is run meanwhile, as it would share the recorder's memory.
        """
        with self._lock, FirstTimes.during():
            inputs = StepInputs(rows)
            inputs.fill(hidden, rows, cos_sin)
            yield lambda work: self._recorder.record(lambda: work(inputs))[1]

    def forget(self) -> None:
        """Record each step again when it comes next."""
        with self._lock:
            self._graphs.clear()

    def describe(self, backend: str) -> str:
        """What is used, or why nothing is."""
        if backend != "auto":
            return f"not used: attention={backend!r} gets the text's length from the host; leave it at auto"
        if self.failed is not None:
            return f"not used: {self.failed}"
        sizes = sorted({math.prod(sizes[:-2]) for sizes, *_ in self._graphs})
        recorded = f"; recorded: {len(self._graphs)}, of {', '.join(map(str, sizes))} rows" if sizes else ""
        return f"one for each bucket of rows, attention by Triton{recorded}"
