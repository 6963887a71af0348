"""Target: the interface of a model; :mod:`specdec.models.transformers_target` implements it over transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specdec.runners.runner import FINAL
from specdec.step.cache import KVCache
from specdec.step.forward_passes import Pass
from specdec.step.joining import joined
from specdec.step.step_io import LayerPlan, StepInput
from specdec.step.step_output import StepOutput

if TYPE_CHECKING:  # it imports transformers, which a drafter's interface does without
    from specdec.sampling.sampler import Sampler

__all__ = ["FINAL", "Forward", "Target", "forward_pass", "run_steps"]


class Target(Protocol):
    """A model, as the engine and drafters use it.

    ``layer_weights`` is the number of weights in all layers; a forward reads them and the head's. ``shared``: whether
    several processes run each forward together.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_weights: int
    shared: bool
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

    def forward(self, step: StepInput) -> StepOutput:
        """Run rows of one sequence or several, as ``step`` says."""

    def greet(self, sampler: Sampler, **others: Any) -> None:
        """At the start of a text, see that all processes begin the same one; ``others``: what else decides the text."""

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

    def __call__(self, steps: Sequence[StepInput]) -> list[StepOutput]:
        with self.target.active():
            return run_steps(self.target, steps)


def forward_pass(target: Target, step: StepInput) -> Pass:
    """The pass of one sequence's rows; its output is a StepOutput."""
    return Pass(Forward(target, step.plan), step, target.batch_invariant)


def run_steps(target: Target, steps: Sequence[StepInput]) -> list[StepOutput]:
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
    outputs: dict[int, StepOutput] = {}
    scored = 0
    for number, step in enumerate(ranked):
        logits, rows = step.wanted.logits, slice(together.starts[number], together.starts[number + 1])
        places = range(scored, scored + (step.rows if logits is None else len(logits)))
        own = logits.tolist() if logits is not None and places else None
        outputs[id(step)] = output.of(rows, places, own, step.wanted.hidden, number)
        scored = places.stop
    return [outputs[id(step)] for step in steps]


def _layer(step: StepInput) -> int:
    """The layer that the rows of one sequence enter; -1 for tokens."""
    layers: Any = (-1,) if step.entering is None else step.entering.layer
    return int(layers[0])
