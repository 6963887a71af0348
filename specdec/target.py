"""Target: the interface of a model; :mod:`specdec.models.transformers_target` implements it over transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypedDict, Unpack

import torch

from specdec.runners.runner import FINAL
from specdec.sampling.scores import Scores
from specdec.step.block import Rows
from specdec.step.cache import KVCache
from specdec.step.tree import Entry

__all__ = ["FINAL", "ForwardOptions", "Target", "TargetOutput"]

_ALL = slice(None)


class TargetOutput:
    """The output of one forward, or the rows of it that belong to one sequence.

    Args:
        logits: [R, V] of the rows asked for, or their scores; None where none were, or the forward left early.
        hidden: [T, D] residual stream after the last layer that ran.
        taps: see the attribute. A layer that only the first rows came through has only those rows.
        first_time: see the attribute.

    Attributes:
        first_time: whether a graph was recorded or a kernel compiled for the forward, so that its time says nothing of
            the forwards after it.
        taps: hidden layer number -> [T, D] residual stream after that many layers; ``FINAL``: after the last norm.
    """

    __slots__ = ("_hidden", "_logits", "_rows", "_scored", "first_time", "taps")

    def __init__(
        self,
        logits: torch.Tensor | Scores | None,
        hidden: torch.Tensor,
        taps: Mapping[int, torch.Tensor] | None = None,
        *,
        first_time: bool = False,
    ) -> None:
        self.first_time = first_time
        self._logits, self._hidden, self._rows = logits, hidden, _ALL
        self._scored: tuple[Scores, int, int] | None = None  # a forward's scores, and which of its rows these are
        self.taps: Mapping[int, torch.Tensor] = {} if taps is None else taps

    def part(
        self, first: int, last: int, scored: tuple[Scores, int, int] | None, taps: Collection[int]
    ) -> TargetOutput:
        """Rows [first, last), and the hidden states of these ``taps``; cut when they are read.

        ``scored``: the scores of the forward, and the range of this part's rows among them; None where it has none.
        """
        part = TargetOutput(None, self._hidden, first_time=self.first_time)
        part._rows, part._scored = slice(first, last), scored
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


class ForwardOptions(TypedDict, total=False):
    """Options of a forward.

    Attributes:
        entry: hidden states of rows that already passed the first layers.
        exit_layer: the layer to stop before; None runs all layers and the head.
        taps: hidden layers to return.
        rows: rows to return logits for; None for all, empty for none.
        top_k: how many of each row's largest logits will be read; 1 if left out.
    """

    entry: Entry | None
    exit_layer: int | None
    taps: Collection[int]
    rows: Sequence[int] | None
    top_k: int


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

    def forward(self, block: Rows, **options: Unpack[ForwardOptions]) -> TargetOutput:
        """Run the block's rows through layers [entry.layer or 0, exit_layer or all)."""

    def check_unchanged(self) -> None:
        """Raises TargetError where the model was changed in a way that ``forward`` would not follow."""

    def version(self) -> object:
        """A value that is equal to an earlier one while ``forward`` still computes the same."""

    def describe(self) -> dict[str, dict[str, Any]]:
        """How the model is run, and why: section -> name -> value."""

    def active(self) -> AbstractContextManager[None]:
        """A context manager inside which ``forward`` may be called."""

    def embed(self, tokens: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """[N, D] embeddings of tokens [N], the first layer's input; a list is looked up on the host if possible."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [..., D] through the last norm."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., D] that passed the last norm."""

    def head_of(self, tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The head restricted to tokens [d], as a function from [..., D] to [..., d]; it copies their rows."""
