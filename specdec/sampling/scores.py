"""The logits of one step's scored rows, and what is read of them: argmax, top-k, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specdec.errors import NumericalError
from specdec.native.scores import Stored, largest, weighed
from specdec.results import TokenLogprobs
from specdec.step import device_copies

__all__ = ["RowArgmax", "Scores", "extremes", "finite_argmax", "no_distribution"]

_UNSOUND = -1  # in the place of a token where logits are no distribution


class RowArgmax:
    """The token with the largest of each row's logits: one reduction and one transfer for all rows, once asked for.

    Args:
        found: the logits [R, V], or the tokens, where they are known.
        stored: where the logits are, if the library reads them there.
        drawn: the tokens that were drawn with the logits, see :attr:`specdec.step.block.Block.draw`; -1 where none was.
    """

    def __init__(
        self, found: torch.Tensor | list[int], stored: Stored | None = None, drawn: Sequence[int] = ()
    ) -> None:
        self._found, self.stored, self.drawn = found, stored, drawn
        self._tokens: torch.Tensor | None = None

    def of(self, first: int, last: int) -> list[int]:
        """Tokens of rows [first, last); -1 where a row's logits are no distribution."""
        if isinstance(self._found, torch.Tensor):
            self._found = finite_argmax(self._found).tolist()
        return self._found[first:last]

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [R], those of all rows, where the logits are; nothing is copied."""
        assert isinstance(self._found, torch.Tensor)
        if self._tokens is None:
            self._tokens = finite_argmax(self._found)
        return self._tokens


@dataclass(slots=True, eq=False)
class Scores:
    """The logits of one step's scored rows.

    Attributes:
        given: the logits, or what copies or cuts them from others where somebody reads them.
        rows: the R draft rows, ascending; None where row i is logits[i].
        shared: where the rows went through the target, perhaps beside others: the peaks of all, the first of these rows
            and the one after their last.
        processed: [R, V] after the processors, where these took all rows at once (``Sampler.together``).
    """

    given: torch.Tensor | Callable[[], torch.Tensor]
    rows: Sequence[int] | None = None
    shared: tuple[RowArgmax, int, int] | None = None
    processed: torch.Tensor | None = None
    _place: Mapping[int, int] | None = None
    _best: Sequence[int] = ()
    _target_tokens: Sequence[int] = ()
    _top: Sequence[list[int]] = ()
    _values: Sequence[Sequence[float]] = ()

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
        """Where a draft row stands in ``logits``."""
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
            argmax, first, last = self.row_argmax()
            tokens = argmax.of(first, last)
            if _UNSOUND in tokens:
                raise no_distribution(self.logits)
            self._best = tokens
        best = self._best[row if self.rows is None else self.place(row)]
        if best == _UNSOUND:
            raise no_distribution(self.of(row))
        return best

    def row_argmax(self) -> tuple[RowArgmax, int, int]:
        """Largest logits of these rows or of more, the first of these rows among them, and the one after their last."""
        if self.shared is None:
            self.shared = RowArgmax(self.logits), 0, self.logits.shape[0]
        return self.shared

    def target_token(self, row: int) -> int | None:
        """The target's own token after a row, where it was drawn with the logits, or all rows' were at once
        (``Sampler.decide``); else None.

        Raises:
            NumericalError: the row's logits are no distribution.
        """
        if not self._target_tokens:
            argmax, first, _ = self.shared or (None, 0, 0)
            token = argmax.drawn[first + self.place(row)] if argmax is not None and argmax.drawn else -1
            return None if token < 0 else token
        token = self._target_tokens[self.place(row)]
        if token == _UNSOUND:
            raise no_distribution(self.of(row))
        return token

    def decided(
        self, best: Sequence[int], own: Sequence[int], top: Sequence[int] = (), values: Sequence[float] = ()
    ) -> None:
        """Keep what was copied from the device: the largest logit's token per row, the target's own, and ``top``.

        ``values``: the logits of the latter, or none.
        """
        self._best, self._target_tokens = best, own
        count = len(top) // len(best)
        firsts = range(0, len(top), max(count, 1))
        self._top = [list(top[start : start + count]) for start in firsts]
        self._values = [values[start : start + count] for start in firsts if values]

    def top(self, count: int) -> torch.Tensor:
        """[R, k] of each scored row the tokens with the ``count`` largest raw logits, the largest first."""
        return self.logits.topk(min(count, self.logits.shape[-1]), -1).indices

    def top_k(self, count: int) -> list[list[int]]:
        """Of each scored row the ``count`` tokens with the largest raw logits, the largest first."""
        whole, places = self._source
        if self._top and len(self._top[0]) >= min(count, whole.shape[-1]):
            return [tokens[:count] for tokens in self._top]
        best = largest(whole, places, count)
        return self.top(count).tolist() if best is None else best

    def weighed(self, count: int) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]] | None]:
        """Of each scored row the ``count`` likeliest tokens and their raw logits, the largest first.

        None in the place of logits that are elsewhere, on an accelerator or another rank.
        """
        if self._values:
            return [row[:count] for row in self._top], [row[:count] for row in self._values]
        whole, places = self._source
        if isinstance(whole, torch.Tensor) and device_copies.is_apart(whole.device):
            return self.top_k(count), None
        if (found := weighed(whole, places, count)) is not None:
            return found
        logits, tokens = self.logits.topk(min(count, whole.shape[-1]), -1)
        return tokens.tolist(), logits.tolist()

    @property
    def _source(self) -> tuple[torch.Tensor | Stored, Sequence[int] | None]:
        """Logits, as the library reads them where that is known, and which of their rows are these; None for all."""
        if self.shared is None or (whole := self.shared[0].stored) is None:
            return self.logits, None
        _, first, last = self.shared
        return whole.part(first, last - first), None

    def row(self, row: int) -> torch.Tensor | Stored:
        """[V] raw logits of a draft row, for who draws from them."""
        if self.shared is None or (whole := self.shared[0].stored) is None:
            return self.of(row)
        return whole.part(self.shared[1] + self.place(row), 1)

    def select(self, rows: Sequence[int], numbers: Sequence[int] | None) -> Scores:
        """The scores of some ``rows``, which are called ``numbers`` from now on; None: 0, 1, 2, ..."""
        return _Selected(self, [self.place(row) for row in rows], numbers)

    def logprobs(self, path: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Of the token emitted after each row of the path, and of so many likeliest ones, from the raw logits."""
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
    """Some of others' scores."""

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
    """[R] int64, the largest of [R, V]."""
    values, tokens = logits.max(-1)
    return torch.where(values.abs() < math.inf, tokens, _UNSOUND)
