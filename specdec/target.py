"""Target: what engine and drafters need of a model; :mod:`specdec.models.transformers_target` is over transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypedDict, Unpack

import torch

from specdec.runners.runner import FINAL
from specdec.sampling.scores import RowArgmax, Scores
from specdec.step.block import Rows
from specdec.step.cache import KVCache
from specdec.step.tree import Entry

__all__ = ["FINAL", "ForwardOptions", "Target", "TargetOutput"]

_ALL = slice(None)


class TargetOutput:
    """What one forward gave, or what of it are one sequence's rows.

    Args:
        logits: of the rows asked for; None where none were, or the forward left early.
        hidden: [T, D] residual stream after the last layer that ran.
        taps: see the attribute; of a layer that only the first rows came through, those.
        argmax: see the attribute.

    Attributes:
        taps: hidden layer number -> [T, D] residual stream after that many layers; ``FINAL``: after the last norm.
        argmax: the likeliest tokens of a batch's rows, found for all at once, and where these rows begin and end among
            them.
    """

    __slots__ = ("_hidden", "_logits", "_rows", "argmax", "taps")

    def __init__(
        self,
        logits: torch.Tensor | None,
        hidden: torch.Tensor,
        taps: Mapping[int, torch.Tensor] | None = None,
        argmax: tuple[RowArgmax, int, int] | None = None,
    ) -> None:
        self._logits, self._hidden, self._rows = logits, hidden, _ALL
        self.taps: Mapping[int, torch.Tensor] = {} if taps is None else taps
        self.argmax = argmax

    def part(
        self, first: int, last: int, argmax: tuple[RowArgmax, int, int] | None, taps: Collection[int]
    ) -> TargetOutput:
        """Rows [first, last), whose logits are those of ``argmax``, and of the taps these; nothing is cut before it is
        read."""
        part = TargetOutput(None if argmax is None else self._logits, self._hidden, argmax=argmax)
        part._rows = slice(first, last)
        if taps:
            part.taps = _Cut(self.taps, first, last, taps)
        return part

    @property
    def logits(self) -> torch.Tensor | None:
        """[R, V] of the rows asked for, in the target's dtype; None where none were, or the forward left early."""
        if self._rows is _ALL or self._logits is None or self.argmax is None:
            return self._logits
        return self._logits[self.argmax[1] : self.argmax[2]]

    @property
    def hidden(self) -> torch.Tensor:
        """[T, D] residual stream after the last layer that ran."""
        return self._hidden if self._rows is _ALL else self._hidden[self._rows]

    def scores(self, rows: Sequence[int] | None) -> Scores:
        """Of the ``rows`` that logits were asked for."""
        assert self._logits is not None
        return Scores(self._logits if self._rows is _ALL else self._cut, rows, self.argmax)

    def _cut(self) -> torch.Tensor:
        assert self.logits is not None
        return self.logits


class _Cut(Mapping[int, torch.Tensor]):
    """Of some layers' hidden states rows [first, last), cut when they are read, where there are as many."""

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


class ForwardOptions(TypedDict, total=False):
    """What a forward is told beside its rows.

    Attributes:
        entry: hidden states of the rows, where they passed the first layers already.
        exit_layer: the layer to stop before; None runs all of them, and the head.
        taps: hidden layers wanted back.
        rows: those whose logits are wanted; None for all, empty for none.
        top_k: how many of each one's largest logits will be read; 1 if left out.
    """

    entry: Entry | None
    exit_layer: int | None
    taps: Collection[int]
    rows: Sequence[int] | None
    top_k: int


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
    def batch_invariant(self) -> bool:
        """Whether a row's numbers are the same, bit for bit, whatever rows are beside it."""

    def new_cache(self, *, capacity: int, rows: int) -> KVCache:
        """An empty cache for a text of ``capacity`` tokens and forwards of up to ``rows`` rows."""

    def forward(self, block: Rows, **options: Unpack[ForwardOptions]) -> TargetOutput:
        """Run the block's rows through layers [entry.layer or 0, exit_layer or all)."""

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
