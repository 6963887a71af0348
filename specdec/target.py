"""Target: what engine and drafters need of a model; :mod:`specdec.model` is the one over transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from specdec.block import Rows
from specdec.cache import KVCache
from specdec.draft import Draft, Entry
from specdec.runners.runner import FINAL
from specdec.sampling import Peaks, Sampler, Scores
from specdec.verify import Verdict

__all__ = ["FINAL", "Target", "TargetOutput"]


@dataclass(slots=True, eq=False)
class TargetOutput:
    """What one forward gave.

    Attributes:
        logits: [R, V] of the rows asked for, in the target's dtype; None where none were, or the forward left early.
        hidden: [T, D] residual stream after the last layer that ran.
        taps: hidden layer number -> [T, D] residual stream after that many layers; ``FINAL``: after the last norm.
        peaks: the likeliest tokens of a batch's rows, found for all at once, and where these rows begin and end among
            them.
    """

    logits: torch.Tensor | None
    hidden: torch.Tensor
    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    peaks: tuple[Peaks, int, int] | None = None

    def scores(self, rows: Sequence[int] | None) -> Scores:
        """Of the ``rows`` that logits were asked for."""
        assert self.logits is not None
        return Scores(self.logits, rows, self.peaks)


class Target(Protocol):
    """What engine and drafters need of a model.

    ``layer_weights`` counts the numbers in all layers' weights, which a forward reads besides those of the head.
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
    def alike(self) -> bool:
        """Whether a row's numbers are the same, bit for bit, whatever rows are beside it."""

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        """An empty cache for a text of ``capacity`` tokens and forwards of up to ``rows`` rows."""

    def forward(
        self,
        block: Rows,
        *,
        entry: Entry | None = None,
        exit_layer: int | None = None,
        taps: Collection[int] = (),
        rows: Sequence[int] | None = None,
        likeliest: int = 1,
    ) -> TargetOutput:
        """Run the block's rows through layers [entry.layer or 0, exit_layer or all).

        ``rows``: those whose logits are wanted; None for all, empty for none. ``likeliest``: how many of each one's
        largest somebody will read.
        """

    def verify(
        self, output: TargetOutput, draft: Draft, sampler: Sampler, likeliest: int, scores: Scores | None = None
    ) -> tuple[Verdict, Scores]:
        """Judge a draft by what its forward gave; ``likeliest`` is the drafter's.

        ``scores`` are the output's, where something was copied from the device already.
        """

    def check_unchanged(self) -> None:
        """Raises TargetError where the model was changed in a way that ``forward`` would not follow."""

    def version(self) -> object:
        """Equal to one of before where ``forward`` still computes what it did then."""

    def describe(self) -> dict[str, dict[str, Any]]:
        """What runs, and why: section -> name -> value."""

    def active(self) -> AbstractContextManager[None]:
        """A context manager inside which ``forward`` may be called."""

    def embed(self, tokens: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """[N, D] what the first layer gets of tokens [N]; of a list, where the host has it to look up."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D] through the last norm."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D] that passed the last norm."""

    def head_of(self, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head over these tokens [d] alone: [..., D] to [..., d], with a copy of their rows."""
