"""LayerRunner: the code that runs a model's layers, from tokens to logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec.runners.boundary_ops import Joints
from specdec.runners.recording import Recording
from specdec.runners.replicas import Evaluated
from specdec.runners.rotary import Angles
from specdec.runners.rows import Rows
from specdec.step.cache import KVCache
from specdec.step.pages import PagePool
from specdec.step.slots import LayerSpec
from specdec.step.step_output import StepOutput

__all__ = ["FINAL", "Layer", "LayerRunner"]

FINAL = -1
"""Tap for the hidden states after the last norm, which the head reads."""

Layer = Callable[[torch.Tensor, Rows, Angles], torch.Tensor]
"""[T, D] of a forward's rows through one layer, at these rotary positions."""


class LayerRunner(ABC):
    """One way to run a model's layers.

    The rows say what each of them sees and where its keys and values are stored. A runner has no state of a sequence,
    so they may be of several sequences.

    Attributes:
        name: as in ``execution=``.
        borrows: whether it calls the model's own attention modules.
        varies: why a row's results depend on other rows in the forward; None where they are bit-identical.
        experts: how experts are run, where the layers have some and that is known; else None.
        pages: whether its kernels read caches in pages.
        recording: what drafters on its device have their passes recorded by; None where nothing is recorded.
        looks_up: whether ``run`` and ``finish`` accept None for hidden states, and embed the rows' tokens themselves.
        whole: whether ``finish`` is all that it can: no layers are run by themselves, and none is entered or left.
        embed: [1, T] tokens to [1, T, D].
        norm: the last norm, [..., D].
        head: [..., D] that passed the last norm to logits [..., V], before any soft cap.
    """

    name: str
    borrows: bool = False
    varies: str | None = "torch's products and attention sum in another order for other numbers of rows"
    experts: str | None = None
    looks_up: bool = False
    whole: bool = False
    pages: bool = False
    recording: Recording | None = None
    embed: Callable[[torch.Tensor], Any]
    norm: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]

    def new_cache(self, specs: Sequence[LayerSpec], *, capacity: int, rows: int) -> KVCache:
        """An empty cache of these specs, as the runner's kernels read it."""
        return KVCache(specs, capacity=capacity, rows=rows)

    @property
    def pools(self) -> Collection[PagePool]:
        """The pages of all texts, where caches are in pages."""
        return ()

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's results are bit-identical whatever other rows are in the forward."""
        return self.varies is None

    @abstractmethod
    def run(
        self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, taps: Collection[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run [T, D] through layers [first, last); also returns the inputs of the layers in ``taps`` below ``last``."""

    def enter(self, rows: Rows) -> torch.Tensor:
        """[T, D] of the rows' tokens, embedded."""
        hidden: torch.Tensor = self.embed(rows.tokens)[0]
        return hidden

    def finish(self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, joints: Joints) -> StepOutput:
        """As :meth:`run` to the last layer, then through the last norm (tap ``FINAL``) and the head.

        What is made is ``rows.step.wanted``.
        """
        wanted = rows.step.wanted
        hidden, found = self.run(hidden, rows, first, last, wanted.hidden)
        if FINAL in wanted.hidden:
            found[FINAL] = self.norm(hidden)
        if wanted.nothing:
            return StepOutput(out=hidden, hidden=found)
        chosen = found.get(FINAL, hidden)
        if wanted.logits is not None:
            chosen = chosen.index_select(0, rows.index(chosen.device))
        normed = chosen if FINAL in wanted.hidden else self.norm(chosen)
        return StepOutput(joints.logits(self.head(joints.hidden(normed))), wanted.scored, out=hidden, hidden=found)

    def graphs(self, backend: str) -> str:
        """How steps are replayed as CUDA graphs with such attention, or why they are not."""
        return f"not used: {self.name} layers are not all Llama-like layers that Triton's kernels run on one device"

    def cuts(self) -> str | None:
        """How products are cut that have several ways of the same numbers, and why; None where there is one way."""
        return None

    def measure_rows(self, specs: Sequence[LayerSpec]) -> None:
        """Run a layer in blocks of several sizes, where ``varies`` depends on that; ``specs``: of all caches."""
        del specs

    def choose_cuts(self, rows: Callable[[int], Rows], most: int) -> None:
        """Choose among them by the time of whole steps, for steps of up to ``most`` rows; does nothing where it cannot.

        ``rows``: makes a step's rows from their number.
        """
        del rows, most  # there is one way

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        """While inside, each row has all experts, where a known router chooses some: for the check at load."""
        yield

    def misroutes(self) -> str | None:
        """How it chooses experts otherwise than the model's routers do, or None."""
        return None

    def look(self) -> None:
        """Read again the modules of the model that the runner calls; called before a generation."""
        for called in (self.embed, self.norm, self.head):
            if isinstance(called, Evaluated):
                called.look()

    def changed(self) -> str | None:
        """A change of the model that the runner would not follow, as text; None if there is none."""
        return None
