"""Target: the interface of a model.

:mod:`specdec.models.described_target` implements it for decoders that a spec describes, and
:mod:`specdec.models.transformers_target` for live models of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from specdec.runners.linear import PackedWeight
from specdec.runners.recording import Recording
from specdec.step import device_copies
from specdec.step.cache import KVCache, LayerSpec
from specdec.step.forward_passes import Pass
from specdec.step.joining import joined
from specdec.step.step_io import FINAL, LayerPlan, StepInput
from specdec.step.step_output import StepOutput

if TYPE_CHECKING:  # it imports transformers, which a drafter's interface does without
    from specdec.sampling.sampler import Sampler

__all__ = ["FINAL", "Forward", "Target", "forward_pass", "run_steps"]


class Target(Protocol):
    """A model, as the engine and drafters use it; what has a value here is so unless a target says otherwise.

    Attributes:
        layer_weights: the number of weights in all layers; a forward reads them and the head's.
        sublayer_weights: for each layer those of its attention and of the rest; empty where they are not known apart.
        shared: whether several processes run each forward together.
        splits: whether each of them has some of the rows.
        agreed_curve: returns the cost curve of all of them.
        path: the folder, file or hub id that it was loaded from; empty for a model that was made in memory.
        config: transformers' config of its texts.
        specs: what each layer caches.
        executor: what runs its decoder, where a spec describes it.
        activations: ``int8`` where rows are rounded to it before products with quantised blocks, else None.
        pages: whether caches are in pages.
        recording: what drafters on its device have their passes recorded by; None where nothing is recorded.
        packed_head: the packed weight that the head multiplies hidden states with; None where it is not packed, or does
            more.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_weights: int
    sublayer_weights: Sequence[tuple[int, int]] = ()
    shared: bool = False
    splits: bool = False
    agreed_curve: Callable[..., Any] | None = None
    context_length: int
    eos_ids: frozenset[int]
    device: torch.device
    head_device: torch.device
    dtype: torch.dtype
    backend: str
    options: dict[str, Any]
    path: str = ""
    config: Any = None
    specs: Sequence[LayerSpec] = ()
    executor: Any = None
    activations: str | None = None
    pages: bool = False
    recording: Recording | None = None
    packed_head: PackedWeight | None = None

    @property
    def launches(self) -> bool:
        """Whether forwards are only launched, on an accelerator: a step's numbers come by one copy, which waits, whole
        steps are what can be timed, and kernels are compiled or recorded when they first run.
        """
        return device_copies.is_apart(self.device) and device_copies.is_apart(self.head_device)

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's results are bit-identical whatever other rows are in the forward."""

    @property
    def generation_config(self) -> Any:
        """Transformers' defaults for texts, as the checkpoint has them."""
        return None

    @property
    def embedding_rows(self) -> PackedWeight | torch.Tensor | None:
        """The weight [V, D] whose rows are embeddings; None where more is done to them, or only a module can tell."""
        return None

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        """An empty cache for a text of ``capacity`` tokens and forwards of up to ``rows`` rows."""

    def most_bytes(self, *, capacity: int, rows: int, drafted: int) -> int:
        """Bytes that such a cache may come to hold; ``drafted``: most rows behind the text's end."""
        return KVCache.most_bytes(self.specs, capacity=capacity, rows=rows)

    def forward(self, step: StepInput) -> StepOutput:
        """Run rows of one sequence or several, as ``step`` says."""

    def greet(self, sampler: Sampler, **others: Any) -> None:
        """At the start of a text, see that all processes begin the same one; ``others``: what else decides the text."""

    def check_layers(self, asked: str) -> None:
        """Raises ConfigError where no layer can be entered, left or skipped, which ``asked`` (a drafter) does."""

    def check_methods(self, names: Collection[str]) -> None:
        """Raises TargetError where a method of the model was replaced that transformers' ``generate`` would call."""
        return

    def check_unchanged(self) -> None:
        """Raises TargetError where the model was changed in a way that ``forward`` would not follow."""

    def version(self) -> object:
        """A value that is equal to an earlier one while ``forward`` still computes the same."""

    def describe(self) -> dict[str, dict[str, Any]]:
        """How the model is run, and why: section -> name -> value."""

    def warm_up(
        self,
        rows: int,
        *,
        sequences: int = 1,
        taps: Collection[int] = (),
        exit_layer: int | None = None,
        levels: int = 0,
    ) -> None:
        """Run steps of every bucket, so that no later one has to compile or record it; on a device that records.

        Args:
            rows: most rows of a sequence's step.
            sequences: most sequences of a step. Several have up to 64 rows together, or one each.
            taps: hidden layers that the steps return.
            exit_layer: the layer before which passes leave, and at which the steps enter; None for none.
            levels: most rows of a tree whose levels are run one after the other; 0 for none.
        """
        return

    def cache_room(self) -> int | None:
        """Bytes that the pages of further texts may have; None where caches are not in pages, and there is no telling.

        It is what is free of the pages that there are, and most of what the device has left. The rest is for what
        forwards compute, and for the drafters' own caches.
        """
        return None

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, sorted by transformers' names for them; what is packed or offloaded is brought in turn."""
        return iter(())

    def active(self) -> AbstractContextManager[None]:
        """A context manager inside which ``forward`` may be called."""

    def embed(self, tokens: torch.Tensor | Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """[N, D] embeddings of tokens [N], the first layer's input; a list is looked up on the host if possible."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D] through the last norm."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D] that passed the last norm."""

    def head_of(
        self, tokens: torch.Tensor | None, *, dtype: torch.dtype | None = None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head restricted to tokens [d], as a function from [..., D] to [..., d]; it copies their rows.

        None takes all tokens. With a ``dtype`` gradients may pass, as in training.
        """


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
