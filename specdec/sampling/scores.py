"""Scores: the logits of one step's scored rows, with their argmax, top-k and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specdec.errors import NumericalError
from specdec.native.scores import Stored, largest, weighed
from specdec.results import TokenLogprobs
from specdec.step import device_copies

__all__ = ["Scores", "extremes", "finite_argmax", "no_distribution"]

_UNSOUND = -1  # in the place of a token where logits are no distribution


@dataclass(slots=True, eq=False)
class Scores:
    """The logits of one step's scored rows, or of all sequences' scored rows in one forward.

    Attributes:
        given: the logits [R, V], or a function that copies or cuts them from others when they are first read.
        rows: the R draft rows, ascending; None where row i is logits[i].
        stored: the memory of the logits, where the native library reads it.
        drawn: per scored row the token that was drawn with the logits, see :class:`specdec.step.step_io.Draws`; -1
            where none was. Empty where no row has one.
        picked: int64 [R] on the logits' device, the same where a step made the draws of all rows there.
        walked: int64 [R, 3] beside it, of a row's sequence: the last row that ``match`` accepts, its depth, and the
            target's token after that row.
        processed: [R, V] after the processors, where these took all rows at once (``Sampler.together``).
    """

    given: torch.Tensor | Callable[[], torch.Tensor]
    rows: Sequence[int] | None = None
    stored: Stored | None = None
    drawn: Sequence[int] = ()
    picked: torch.Tensor | None = None
    walked: torch.Tensor | None = None
    processed: torch.Tensor | None = None
    _argmax: torch.Tensor | None = None  # of all rows, on the logits' device
    _largest: Sequence[int] = ()  # each row's argmax, -1 where its logits are no distribution
    _best: Sequence[int] = ()  # the same, checked
    _part_of: tuple[Scores, int, int] | None = None  # the scores of a whole forward, and which of its rows these are
    _place: Mapping[int, int] | None = None
    _target_tokens: Sequence[int] = ()
    _top: Sequence[list[int]] = ()
    _values: Sequence[Sequence[float]] = ()

    def part(self, first: int, last: int) -> Scores:
        """Rows [first, last) of a forward's scores. Nothing is cut before it is read."""
        stored = None if self.stored is None else self.stored.part(first, last - first)
        drawn = self.drawn[first:last]
        return Scores(lambda: self.logits[first:last], None, stored, drawn, _part_of=(self, first, last))

    @property
    def logits(self) -> torch.Tensor:
        """[R, V], raw, in the target's dtype."""
        if not isinstance(self.given, torch.Tensor):
            self.given = self.given()
        return self.given

    def of(self, row: int) -> torch.Tensor:
        """[V] raw logits of a draft row."""
        return self.logits[self.place(row)]

    def place(self, row: int) -> int:
        """The row of ``logits`` that belongs to a draft row."""
        if self.rows is None:
            return row
        if self._place is None:
            self._place = {row: place for place, row in enumerate(self.rows)}
        return self._place[row]

    def argmax(self, row: int) -> int:
        """The token with the largest raw logit at a row.

        Raises:
            NumericalError: a row holds NaN, or no finite logit at all.
        """
        if not self._best:
            tokens = self.largest()
            if _UNSOUND in tokens:
                raise no_distribution(self.logits)
            self._best = tokens
        best = self._best[row if self.rows is None else self.place(row)]
        if best == _UNSOUND:
            raise no_distribution(self.of(row))
        return best

    def largest(self) -> Sequence[int]:
        """Argmax of each scored row, -1 where a row's logits are no distribution.

        One reduction and one copy to the host do for all rows of a forward.
        """
        if not self._largest:
            if self._part_of is None:
                self._largest = self.device_argmax()[0].tolist()
            else:
                all_rows, first, last = self._part_of
                self._largest = all_rows.largest()[first:last]
        return self._largest

    def device_argmax(self) -> tuple[torch.Tensor, int, int]:
        """int64 argmax of all rows of the forward, on the logits' device, and the range of these rows among them."""
        if self._part_of is not None:
            all_rows, first, last = self._part_of
            if all_rows._argmax is None or all_rows._part_of is not None:
                argmax, offset, _ = all_rows.device_argmax()
                return argmax, offset + first, offset + last
            return all_rows._argmax, first, last
        if self._argmax is None:
            self._argmax = finite_argmax(self.logits)
        return self._argmax, 0, len(self._argmax)

    def device_picked(self) -> tuple[torch.Tensor, int, int] | None:
        """As :meth:`device_argmax` the draws of all rows; None where none were made there."""
        if self._part_of is not None:
            all_rows, first, last = self._part_of
            found = all_rows.device_picked()
            return None if found is None else (found[0], found[1] + first, found[1] + last)
        return None if self.picked is None else (self.picked, 0, len(self.picked))

    def device_walked(self, first: int = 0) -> torch.Tensor | None:
        """int64 [3] of ``walked``, of the sequence that has row ``first`` of these; None where nothing was walked."""
        if self._part_of is not None:
            whole, before, _ = self._part_of
            return whole.device_walked(before + first)
        return None if self.walked is None else self.walked[first]

    def target_token(self, row: int) -> int | None:
        """The target's token after a row, if it was drawn with the logits or by :func:`decide`; else None.

        Raises:
            NumericalError: the row's logits are no distribution.
        """
        if not self._target_tokens:
            token = self.drawn[self.place(row)] if self.drawn else -1
            return None if token < 0 else token
        token = self._target_tokens[self.place(row)]
        if token == _UNSOUND:
            raise no_distribution(self.of(row))
        return token

    def decided(
        self, best: Sequence[int], own: Sequence[int], top: Sequence[int] = (), values: Sequence[float] = ()
    ) -> None:
        """Keep numbers that were copied from the device: per row the argmax, the target's token, and ``top`` tokens.

        ``values``: the logits of ``top``; may be empty.
        """
        self._best, self._target_tokens = best, own
        if not top:
            self._top = self._values = ()
            return
        count = len(top) // len(best)
        firsts = range(0, len(top), max(count, 1))
        self._top = [list(top[start : start + count]) for start in firsts]
        self._values = [values[start : start + count] for start in firsts if values]

    def top(self, count: int) -> torch.Tensor:
        """[R, k] per scored row the tokens with the ``count`` largest raw logits, the largest first."""
        return self.logits.topk(min(count, self.logits.shape[-1]), -1).indices

    def top_k(self, count: int) -> list[list[int]]:
        """Per scored row the ``count`` tokens with the largest raw logits, the largest first."""
        all_rows, places = self._source
        if self._top and len(self._top[0]) >= min(count, all_rows.shape[-1]):
            return [tokens[:count] for tokens in self._top]
        best = largest(all_rows, places, count)
        return self.top(count).tolist() if best is None else best

    def weighed(self, count: int) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]] | None]:
        """Per scored row the ``count`` likeliest tokens and their raw logits, the largest first.

        The logits are None where they are not on the host, but on an accelerator or another rank.
        """
        if self._values:
            return [row[:count] for row in self._top], [row[:count] for row in self._values]
        all_rows, places = self._source
        if isinstance(all_rows, torch.Tensor) and device_copies.is_apart(all_rows.device):
            return self.top_k(count), None
        if (found := weighed(all_rows, places, count)) is not None:
            return found
        logits, tokens = self.logits.topk(min(count, all_rows.shape[-1]), -1)
        return tokens.tolist(), logits.tolist()

    @property
    def _source(self) -> tuple[torch.Tensor | Stored, Sequence[int] | None]:
        """Logits, as the native library reads them if it can, and which of their rows these are; None for all."""
        return self.logits if self.stored is None else self.stored, None

    def row(self, row: int) -> torch.Tensor | Stored:
        """[V] raw logits of a draft row, as the native library reads them if it can."""
        return self.of(row) if self.stored is None else self.stored.part(self.place(row), 1)

    def select(self, rows: Sequence[int], numbers: Sequence[int] | None) -> Scores:
        """The scores of some ``rows``, renumbered as ``numbers``; None: 0, 1, 2, ..."""
        return _Selected(self, [self.place(row) for row in rows], numbers)

    def logprobs(self, path: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of the token after each row of the path and of the ``top`` likeliest, from raw logits."""
        logits = self.logits[[self.place(row) for row in path]]
        logits = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        best = logits.topk(min(top, logits.shape[-1]), -1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            TokenLogprobs(token, value, tuple(zip(*pair, strict=True)))
            for token, value, pair in zip(tokens, own, pairs, strict=True)
        ]


class _Selected(Scores):
    """Some rows of other scores, as ``Scores.select`` gives them."""

    def __init__(self, whole: Scores, places: Sequence[int], numbers: Sequence[int] | None) -> None:
        self._whole, self._places = whole, places
        best = [whole._best[place] for place in places] if whole._best else []
        top = [whole._top[place] for place in places] if whole._top else []
        weights = [whole._values[place] for place in places] if whole._values else []
        super().__init__(
            lambda: device_copies.pick(whole.logits, places), numbers, _best=best, _top=top, _values=weights
        )

    @property
    def _source(self) -> tuple[torch.Tensor | Stored, Sequence[int]]:
        whole, places = self._whole._source
        return whole, self._places if places is None else [places[place] for place in self._places]


def no_distribution(logits: torch.Tensor) -> NumericalError:
    return NumericalError(
        f"the model's logits are no distribution: {extremes(logits)}; check the weights, or use float32 or bfloat16 "
        "instead of float16"
    )


def extremes(scores: torch.Tensor) -> str:
    nan, size = int(torch.isnan(scores).sum()), scores.numel()
    return f"{nan} of {size} are NaN, the largest is {float(scores.max())}"


def finite_argmax(logits: torch.Tensor) -> torch.Tensor:
    """[R] int64, argmax of each row of [R, V]; -1 where the row has NaN or no finite number."""
    values, tokens = logits.max(-1)
    return torch.where(values.abs() < math.inf, tokens, _UNSOUND)
