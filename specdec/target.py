"""Target: the interface of a model; :mod:`specdec.models.transformers_target` implements it over transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specdec.runners.rows import Rows, TextRows
from specdec.runners.runner import FINAL
from specdec.sampling.scores import Scores
from specdec.step.cache import KVCache
from specdec.step.forward_passes import Pass
from specdec.step.joining import joined
from specdec.step.step_io import LayerPlan, StepInput

__all__ = ["FINAL", "Forward", "Target", "TargetOutput", "forward_pass", "run_steps"]

_ALL = slice(None)


class TargetOutput:
    """The output of one forward, or the rows of it that belong to one sequence.

    Args:
        logits: [R, V] of the rows asked for, or their scores; None where none were, or the forward left early.
        hidden: [T, D] residual stream after the last layer that ran.
        taps: see the attribute. A layer that only the first rows came through has only those rows.
        first_time: see the attribute.
        rows: as they were run; None where none needs them afterwards.

    Attributes:
        first_time: whether a graph was recorded or a kernel compiled for the forward, so that its time says nothing of
            the forwards after it.
        taps: hidden layer number -> [T, D] residual stream after that many layers; ``FINAL``: after the last norm.
    """

    __slots__ = ("_hidden", "_logits", "_of", "_place", "_rows", "_scored", "first_time", "taps")

    def __init__(
        self,
        logits: torch.Tensor | Scores | None,
        hidden: torch.Tensor,
        taps: Mapping[int, torch.Tensor] | None = None,
        *,
        first_time: bool = False,
        rows: Rows | None = None,
    ) -> None:
        self.first_time = first_time
        self._of, self._place = rows, 0
        self._logits, self._hidden, self._rows = logits, hidden, _ALL
        self._scored: tuple[Scores, int, int] | None = None  # a forward's scores, and which of its rows these are
        self.taps: Mapping[int, torch.Tensor] = {} if taps is None else taps

    def part(
        self, number: int, step: StepInput, scored: tuple[Scores, int, int] | None, taps: Collection[int]
    ) -> TargetOutput:
        """The rows of a sequence of the forward, and the hidden states of these ``taps``; cut when they are read.

        ``scored``: the scores of the forward, and the range of this part's rows among them; None where it has none.
        """
        first, last = step.starts[number], step.starts[number + 1]
        part = TargetOutput(None, self._hidden, first_time=self.first_time, rows=self._of)
        part._rows, part._scored, part._place = slice(first, last), scored, number
        if taps:
            part.taps = _Cut(self.taps, first, last, taps)
        return part

    @property
    def logits(self) -> torch.Tensor | None:
        """[R, V] of the rows asked for, in the target's dtype; None where none were, or the forward left early."""
        self._cut()
        return self._logits.logits if isinstance(self._logits, Scores) else self._logits

    def _cut(self) -> None:
        """Have the scores of these rows."""
        if self._scored is not None and self._logits is None:
            whole, first, last = self._scored
            self._logits = whole.part(first, last)

    def likeliest(self, rows: Sequence[int] | None) -> tuple[torch.Tensor, int, int]:
        """As ``device_argmax`` of the scores of ``rows``, which are made only if they are read elsewhere."""
        if self._scored is None:
            return self.scores(rows).device_argmax()
        whole, first, last = self._scored
        argmax, before, _ = whole.device_argmax()
        return argmax, before + first, before + last

    @property
    def rows(self) -> TextRows:
        """The sequence's rows as they were run, with what went to their device."""
        assert self._of is not None
        return self._of.parts[self._place]

    @property
    def nothing(self) -> bool:
        """Whether no logits were computed."""
        return self._logits is None and self._scored is None

    @property
    def hidden(self) -> torch.Tensor:
        """[T, D] residual stream after the last layer that ran."""
        return self._hidden if self._rows is _ALL else self._hidden[self._rows]

    def scores(self, rows: Sequence[int] | None) -> Scores:
        """The scores of the draft's ``rows`` that logits were asked for; None for all."""
        self._cut()
        assert self._logits is not None
        if not isinstance(self._logits, Scores):
            return Scores(self._logits, rows)
        self._logits.rows = rows
        return self._logits


class _Cut(Mapping[int, torch.Tensor]):
    """Rows [first, last) of some layers' hidden states, cut when they are read; layers with fewer rows are left out."""

    __slots__ = ("_first", "_last", "_layers", "_whole")

    def __init__(self, whole: Mapping[int, torch.Tensor], first: int, last: int, layers: Collection[int]) -> None:
        self._whole, self._first, self._last, self._layers = whole, first, last, layers

    def __getitem__(self, layer: int) -> torch.Tensor:
        rows = self._whole[layer]
        if self._last > len(rows) or layer not in self._layers:
            raise KeyError(layer)
        return rows[self._first : self._last]

    def __iter__(self) -> Iterator[int]:
        return (layer for layer, rows in self._whole.items() if layer in self._layers and self._last <= len(rows))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Target(Protocol):
    """A model, as the engine and drafters use it.

    ``layer_weights`` is the number of weights in all layers; a forward reads them and the head's.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_weights: int
    context_length: int
    eos_ids: frozenset[int]
    device: torch.device
    head_device: torch.device
    dtype: torch.dtype
    backend: str
    options: dict[str, Any]

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's results are bit-identical whatever other rows are in the forward."""

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        """An empty cache for a text of ``capacity`` tokens and forwards of up to ``rows`` rows."""

    def forward(self, step: StepInput) -> TargetOutput:
        """Run rows of one sequence or several, as ``step`` says."""

    def check_layers(self, asked: str) -> None:
        """Raises ConfigError where no layer can be entered, left or skipped, which ``asked`` (a drafter) does."""

    def check_unchanged(self) -> None:
        """Raises TargetError where the model was changed in a way that ``forward`` would not follow."""

    def version(self) -> object:
        """A value that is equal to an earlier one while ``forward`` still computes the same."""

    def describe(self) -> dict[str, dict[str, Any]]:
        """How the model is run, and why: section -> name -> value."""

    def active(self) -> AbstractContextManager[None]:
        """A context manager inside which ``forward`` may be called."""

    def embed(self, tokens: torch.Tensor | Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """[N, D] embeddings of tokens [N], the first layer's input; a list is looked up on the host if possible."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D] through the last norm."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D] that passed the last norm."""

    def head_of(self, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head restricted to tokens [d], as a function from [..., D] to [..., d]; it copies their rows."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Runs the rows of several sequences through the layers of a plan; the ``run`` of a pass through a model."""

    target: Target
    plan: LayerPlan

    def __call__(self, steps: Sequence[StepInput]) -> list[TargetOutput]:
        with self.target.active():
            return run_steps(self.target, steps)


def forward_pass(target: Target, step: StepInput) -> Pass:
    """The pass of one sequence's rows; its output is a TargetOutput."""
    return Pass(Forward(target, step.plan), step, target.batch_invariant)


def run_steps(target: Target, steps: Sequence[StepInput]) -> list[TargetOutput]:
    """Run the rows of several sequences, of one plan, as one forward; returns each one's part of the output, in order.

    Those that enter a layer with hidden states join the others there.
    """
    if len(steps) == 1:
        return [target.forward(steps[0])]
    ranked = steps
    if [step for step in steps if step.entering is not None]:
        ranked = sorted(steps, key=_layer)
    together = joined(ranked)
    output = target.forward(together)
    scores = None if output.nothing else output.scores(None)
    outputs: dict[int, TargetOutput] = {}
    scored = 0
    for number, step in enumerate(ranked):
        logits = step.wanted.logits
        count = step.rows if logits is None else len(logits)
        own = (scores, scored, scored + count) if count and scores is not None else None
        outputs[id(step)] = output.part(number, together, own, step.wanted.hidden)
        scored += count
    return [outputs[id(step)] for step in steps]


def _layer(step: StepInput) -> int:
    """The layer that the rows of one sequence enter; -1 for tokens."""
    layers: Any = (-1,) if step.entering is None else step.entering.layer
    return int(layers[0])
