"""CudaExecutor: a decoder on a CUDA device by its spec, in nine launches of Triton kernels per layer.

In half precision a row's results do not depend on the other rows (:mod:`specdec.execute.cuda_layer`), so a text does
not depend on the drafts. Steps, of one sequence or several, are recorded as CUDA graphs
(:mod:`specdec.runners.graphs`); chunks of prompts are launched kernel by kernel, those of several sequences together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.errors import TargetError
from specdec.execute.cuda_kernels import kernels_for
from specdec.execute.cuda_layers import CudaLayers
from specdec.execute.cuda_rope import PlacedTables
from specdec.execute.torch import TorchExecutor
from specdec.execute.weights import DecoderWeights
from specdec.runners.cuts import ChosenCuts, Weight, any_rows
from specdec.runners.graphs import LOGITS, PICKED, CudaRecorder, Outcome, StepGraphs
from specdec.runners.recording import Recording
from specdec.runners.rows import Rows
from specdec.runners.sent_rows import SentRows
from specdec.runners.visibility import bucket
from specdec.step.cache import KVCache
from specdec.step.first_time import FirstTimes
from specdec.step.pages import PagePool
from specdec.step.state import LayerSpec
from specdec.step.step_io import Part, StepInput
from specdec.step.step_output import StepOutput

__all__ = ["CudaExecutor"]

_MOST_ROWS = 256  # for which kernels are compiled; more rows are several programs' affair


class CudaExecutor(TorchExecutor):
    """As :class:`TorchExecutor`, for what :func:`specdec.execute.cuda_kernels.why_not` does not rule out.

    Rows of which parts of layers are left out are run in torch there. Caches are in pages where all attention is the
    kernels' own, which read them. A text longer than the model's context has the graphs recorded again.

    Attributes:
        recording: what drafters on the device have their passes recorded by.
        pages: whether caches are in pages.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, backend: str = "auto"
    ) -> None:
        kernels: Any = kernels_for(checkpoint.spec, dtype, device)
        super().__init__(checkpoint, dtype=dtype, device=device, backend=backend)
        (rope,) = self.spec.ropes
        self._kernels, self._cuts = kernels, ChosenCuts(kernels, device, dtype)
        self._tables = PlacedTables(self._ropes, rope, device)
        self._cuda = CudaLayers(self.spec, self._weights, kernels, self._cuts, self._tables, backend)
        self.varies = self._cuda.varies
        self.pages = self.varies is None
        recorder = CudaRecorder(device)
        self._graphs = StepGraphs(recorder, self._cuda.run)
        self.recording = Recording(kernels, recorder, self.spec.context)
        self._launched: set[tuple[int, bool, str]] = set()  # kinds of rows that were launched kernel by kernel
        self._pools = dict[tuple[LayerSpec, int], PagePool]()
        self.pools = self._pools.values()

    def _read(self, checkpoint: Checkpoint) -> DecoderWeights:
        return DecoderWeights(checkpoint, self.dtype, self.device)

    def measure_rows(self) -> None:
        """Whether a row's results depend on others is known of the kernels."""

    # -- A forward -----------------------------------------------------------------------------------------------------

    def _run(self, step: StepInput, first: int, last: int, hidden: torch.Tensor | None) -> StepOutput:
        """As a torch executor's; where a step is recorded, so are norm, head, argmax, draws, walk and commit.

        Raises:
            TargetError: rows that were committed already are entered again, whose first layers' slots have others now.
        """
        rows, wanted, whole = SentRows(step, self.device, self.backend), step.wanted, last == len(self.spec.layers)
        if step.plan.parts:
            return self._finished(rows, last, self._in_parts(hidden, rows, first, last), {})
        if whole:
            if first and any(text.moved for text in step.texts):
                raise TargetError("rows that a step has committed cannot enter it again; run all layers for them")
            for text in step.texts:
                text.moved = False
        if not (whole and self._graphs.takes(rows)):
            return self._finished(rows, last, *self._through(hidden, rows, first, last, wanted.hidden))
        hidden, found = self._through(hidden, rows, first, last, {*wanted.hidden, LOGITS})
        ends = [found.pop(name, None) for name in (LOGITS, PICKED)]  # not the second where recording failed
        if ends[1] is not None and self._cuda.store is not None:
            for part in rows.parts:
                part.cache.moved = part.decide is not None and part.rows > 1
        if last in wanted.hidden:
            found[last] = hidden
        if wanted.nothing:
            return StepOutput(out=hidden, hidden=found, sent=rows)
        if wanted.logits is not None:
            index = rows.index(hidden.device)
            ends = [None if end is None else end.index_select(0, index) for end in ends]
        return StepOutput(ends[0], wanted.scored, out=hidden, hidden=found, picked=ends[1], sent=rows)

    def _in_parts(self, hidden: torch.Tensor | None, rows: SentRows, first: int, last: int) -> torch.Tensor:
        """Hidden states behind layers of some of which only parts run."""
        hidden = self._embedded(rows.tokens[0]) if hidden is None else hidden
        for parts, begin, end in rows.step.plan.runs(first, last):
            through = self._through if parts is Part.BOTH else super()._through
            hidden, _ = through(hidden, rows, begin, end, ())
        return hidden

    def _through(
        self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, taps: Collection[int]
    ) -> Outcome:
        assert isinstance(rows, SentRows)
        if rows.end > self._cuda.longest:
            self._cuda.longest = self._graphs.kind = 2 * rows.end
        cos, sin = self._tables.reach(rows.end)
        if self._graphs.takes(rows):
            outcome = self._graphs.run(hidden, rows, first, last, taps, None)
            if outcome is not None:
                return outcome
        hidden = self._embedded(rows.tokens[0]) if hidden is None else hidden
        kind = bucket(min(rows.rows, _MOST_ROWS)), len(rows.parts) > 1, rows.backend
        known = kind in self._launched
        self._launched.add(kind)
        with nullcontext() if known else FirstTimes.during():  # kernels are compiled for it
            return self._cuda.run(hidden, rows, first, last, taps, (cos, sin, rows.positions[0]))

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._cuda.normed(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._cuda.logits(hidden)

    # -- Caches, cuts and graphs ---------------------------------------------------------------------------------------

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        if not self.pages:
            return super().new_cache(capacity=capacity, rows=rows)
        pools = {}
        for spec, layers in Counter(self.specs).items():
            pools[spec] = self._pools.setdefault((spec, layers), PagePool(spec, layers))
        return KVCache(self.specs, capacity=capacity, rows=rows, pools=pools)

    def most_bytes(self, *, capacity: int, rows: int, drafted: int) -> int:
        if not self.pages:
            return super().most_bytes(capacity=capacity, rows=rows, drafted=drafted)
        return KVCache.most_page_bytes(self.specs, capacity=capacity, rows=rows, drafted=drafted)

    def attention(self) -> str:
        return super().attention() if self.varies is not None else "by Triton, cut at fixed positions of the text"

    def graphs(self) -> str:
        return self._graphs.describe(self.backend)

    def cuts(self) -> str | None:
        return self._cuts.describe() if self.varies is None else None

    def choose_cuts(self, most: int) -> None:
        if self.varies is not None or self._cuts.card is None:
            return
        text = self.new_cache(capacity=1, rows=most)
        if not self._graphs.takes(self._chain(text, 1)):
            return
        first, *others = self._cuts.buckets()
        counts = {first: 1, **{size: min(size, most) for size in others if size < 2 * most}}

        @contextmanager
        def recording(bucket: int) -> Iterator[Callable[[], Callable[[], None]]]:
            step = self._chain(text, counts[bucket])
            self._tables.reach(step.end)
            with self._graphs.aside(None, step, None) as record:
                yield lambda: record(
                    lambda inputs: self._cuda.run(None, inputs, 0, len(self.spec.layers), {LOGITS}, None)
                )

        if self._cuts.choose([*counts], recording, self._same):
            self._graphs.forget()

    def _chain(self, text: KVCache, count: int) -> SentRows:
        return SentRows(StepInput.of(text, [0] * count), self.device, self.backend)

    def _same(self, weight: Weight, bucket: int, cut: Any) -> bool:
        """Whether a cut of a product gives the bits of the kernels' own table."""
        own = self._cuda.products[weight]
        activations, given = any_rows(bucket, own.weight), {"gated": weight[-1], "whole": own is self._cuda.head}
        one, other = (
            self._kernels.product(activations, own.weight, own.bias, cuts=cuts, **given) for cuts in ({}, {bucket: cut})
        )
        return torch.equal(one, other)
