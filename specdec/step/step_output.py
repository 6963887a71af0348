"""StepOutput: what a forward gave. On a device it is launched and perhaps not done, until :meth:`StepOutput.fetch`.

Logits and hidden states stay where they are. Numbers of each row come to the host: by :meth:`StepOutput.fetch` in the
step's one copy, or on a CPU when they are first read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from specdec.errors import ConfigError, NumericalError
from specdec.native.scores import Stored, draw, weighed
from specdec.results import TokenLogprobs
from specdec.step import device_copies

__all__ = ["StepOutput", "Top", "extremes", "finite_argmax", "no_distribution"]

_PICKED = 5  # numbers of a row that a device decided
_UNSOUND = -1  # in the place of a token where logits are no distribution


class Top(NamedTuple):
    """The ``each`` largest logits of every row, the largest first: tokens [R x each], and their logits.

    The logits are empty where they are not on the host.
    """

    each: int
    tokens: Sequence[int]
    logits: Sequence[float]


class StepOutput:
    """The output of one forward, or of some of its rows.

    Args:
        logits: [R, V] of the rows asked for, in the target's dtype; None where none were.
        rows: see the attribute.
        out: [T, D] residual stream behind the last layer that ran.
        hidden: see the attribute.
        best: [R] argmax of each row, where it is on the host.
        drawn: [R] the target's draws, where some were made with the logits; -1: not.
        top: the largest logits, where they are on the host.
        stored: where the logits are in memory, if the native library reads them.
        picked: int64 [R, 5] on a device: each row's argmax, the target's draw, and of its sequence the last row that
            ``match`` accepts, its depth, and the target's token after it.
        sent: the rows as they were run, with what went to their device.

    Attributes:
        rows: the rows with logits, ascending; None where row i has ``logits[i]``.
        hidden: hidden layer number -> [T, D] its input; ``FINAL``: what the head reads. A layer that only the first
            rows came through has only those rows.
        first_time: whether a graph was recorded or a kernel compiled for the forward, so that its time says nothing of
            the forwards after it.
        own: [R] the target's token after each row, where verification decided all rows before the copy; -1 where its
            scores are no distribution.
        processed: [R, V] after the processors, where these took all rows at once.
        join: where ranks share the rows, what all of them make of a draft; called in place of a rule.
    """

    __slots__ = (
        "_argmax", "_best", "_between", "_drawn", "_logits", "_numbers", "_out", "_picked", "_places", "_stored",
        "_top", "_whole", "first_time", "hidden", "join", "number", "own", "processed", "rows", "sent",
    )  # fmt: skip

    def __init__(
        self,
        logits: torch.Tensor | None = None,
        rows: Sequence[int] | None = None,
        *,
        out: torch.Tensor | None = None,
        hidden: dict[int, torch.Tensor] | None = None,
        best: Sequence[int] = (),
        drawn: Sequence[int] = (),
        top: Top | None = None,
        stored: Stored | None = None,
        picked: torch.Tensor | None = None,
        sent: Any = None,
    ) -> None:
        self.rows, self.sent, self.number, self.first_time = rows, sent, 0, False
        self.hidden: dict[int, torch.Tensor] = {} if hidden is None else hidden
        self.own: Sequence[int] = ()
        self.processed: torch.Tensor | None = None
        self.join: Callable[..., Any] | None = None
        self._logits, self._out = logits, out
        self._best, self._drawn, self._top, self._stored, self._picked = best, drawn, top, stored, picked
        self._argmax: torch.Tensor | None = None
        self._numbers: Mapping[int, int] | None = None
        self._whole: StepOutput | None = None  # the forward's output, which these are some rows of
        self._between = slice(None)
        self._places: Sequence[int] | None = None  # which of the whole's logits these are

    def of(
        self, between: slice, places: range, rows: Sequence[int] | None, layers: Collection[int], number: int
    ) -> StepOutput:
        """The part of a sequence; its logits are cut when they are read.

        Args:
            between: its rows of the forward.
            places: which of the logits are its rows'.
            rows: see the class.
            layers: those whose hidden states it has.
            number: the sequence's.
        """
        end = between.stop
        part = StepOutput(None, rows)
        if layers:
            known = self.hidden.items()
            part.hidden = {one: states[between] for one, states in known if one in layers and len(states) >= end}
        part._whole, part._between, part._places = self, between, places
        part.number, part.first_time = number, self.first_time
        return part

    def select(self, rows: Sequence[int], numbers: Sequence[int] | None) -> StepOutput:
        """The logits of some ``rows``, renumbered as ``numbers``; None: 0, 1, 2, ..."""
        found, places = StepOutput(None, numbers), [self.place(row) for row in rows]
        found._whole, found._places = self._whole or self, _taken(self._places, places)
        return found

    @property
    def logits(self) -> torch.Tensor | None:
        """[R, V] of the rows asked for, raw; None where none were, or the forward left early."""
        if self._logits is None and self._places and self._whole is not None and self._whole._logits is not None:
            self._logits = self._cut(self._whole._logits)
        return self._logits

    @property
    def out(self) -> torch.Tensor:
        """[T, D] residual stream behind the last layer that ran."""
        out = (self._whole or self)._out
        assert out is not None
        return out if self._whole is None else out[self._between]

    def fetch(self, *more: torch.Tensor, top_k: int = 1) -> list[list[Any]]:
        """Bring the forward's numbers from its device, and ``more`` tensors with them: the step's one copy and wait.

        All parts of the forward have its numbers afterwards.

        Args:
            more: further tensors, such as a rule's, or a session's.
            top_k: how many of each row's largest logits are read.

        Returns:
            For each of ``more`` its numbers, flat.
        """
        whole = self._whole or self
        tensors, logits = [whole.argmax_there if whole._picked is None else whole._picked], whole._logits
        if top_k > 1 and logits is not None:
            tensors += reversed(logits.topk(min(top_k, logits.shape[-1]), -1))
        found = device_copies.copy_out([*tensors, *(tensor.to(tensors[0].device) for tensor in more)])
        whole._best = found[0]
        if whole._picked is not None:
            whole._best, whole._drawn = found[0][::_PICKED], found[0][1::_PICKED]
        if len(tensors) > 1:
            whole._top = Top(tensors[1].shape[-1], found[1], found[2])
        return found[len(tensors) :]

    def gather(self, top: Top, hidden: dict[int, torch.Tensor]) -> None:
        """Have what all ranks told of the rows, in place of this rank's own logits and hidden states."""
        self.hidden, self._top, self._numbers = hidden, top, None
        self._logits = self._stored = None
        self._best, self._drawn = top.tokens[:: top.each or 1], ()

    def place(self, row: int) -> int:
        """The row of ``logits`` that belongs to a draft row."""
        if self.rows is None:
            return row
        if self._numbers is None:
            self._numbers = {row: place for place, row in enumerate(self.rows)}
        return self._numbers[row]

    def at(self, row: int) -> torch.Tensor:
        """[V] raw logits of a draft row."""
        return self.given[self.place(row)]

    @property
    def argmax_there(self) -> torch.Tensor:
        """int64 [R] argmax of each row, on the logits' device; -1 where a row is no distribution."""
        whole = self._whole or self
        if whole._argmax is None:
            whole._argmax = finite_argmax(whole.given) if whole._picked is None else whole._picked[:, 0]
        return self._cut(whole._argmax)

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [T] a sequence's tokens as they were run, on their device."""
        tokens: torch.Tensor = self.there.tokens[0]
        return tokens

    @property
    def there(self) -> Any:
        """A sequence's rows as they were run, with what went to their device."""
        return (self._whole or self).sent.parts[self.number]

    @property
    def picked(self) -> torch.Tensor | None:
        """See the class; of these rows."""
        picked = (self._whole or self)._picked
        return None if picked is None else self._cut(picked)

    @property
    def best(self) -> Sequence[int]:
        """The same as :attr:`argmax_there` on the host; one reduction and one copy do for a forward."""
        if not self._best:
            whole = self._whole
            self._best = self.argmax_there.tolist() if whole is None else _taken(whole.best, self._places)
        return self._best

    def argmax(self, row: int) -> int:
        """The token with the largest raw logit at a row.

        Raises:
            NumericalError: the row holds NaN, or no finite logit at all.
        """
        token = (self._best or self.best)[row if self.rows is None else self.place(row)]
        if token == _UNSOUND:
            raise no_distribution(self.at(row))
        return token

    def decided(self, row: int) -> int | None:
        """The target's token after a row, where it was drawn with the logits or decided before the copy; else None.

        Raises:
            NumericalError: the row's scores are no distribution.
        """
        place, drawn = row if self.rows is None else self.place(row), (self._whole or self)._drawn
        if self.own:
            if self.own[place] == _UNSOUND:
                raise no_distribution(self.at(row))
            return self.own[place]
        token = drawn[place if self._places is None else self._places[place]] if drawn else _UNSOUND
        return None if token < 0 else token

    def draw(self, row: int, key: int, temperature: float) -> int | None:
        """The token that the native library draws after a row; None where it cannot decide."""
        stored = (self._whole or self)._stored
        if stored is None:
            return draw(self.at(row), key, temperature)
        place = self.place(row)
        return draw(stored.part(place if self._places is None else self._places[place], 1), key, temperature)

    def top_k(self, count: int) -> list[list[int]]:
        """Per row the ``count`` tokens with the largest raw logits, the largest first."""
        return [[*tokens] for tokens in self.weighed(count)[0]]

    def weighed(self, count: int) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]] | None]:
        """Per row the ``count`` likeliest tokens and their raw logits, the largest first.

        The logits are None where they are on other ranks.
        """
        known = self._known(count)
        if known is not None:
            return known[0], known[1] or None
        if (found := weighed(*self._source, count)) is not None:
            return found
        largest = self.given.topk(min(count, self.given.shape[-1]), -1)
        numbers, each = device_copies.copy_out(largest[::-1]), largest.values.shape[-1]
        tokens, logits = ([own[at : at + each] for at in range(0, len(own), each)] for own in numbers)
        return tokens, logits

    def _known(self, count: int) -> tuple[list[Sequence[int]], list[Sequence[float]]] | None:
        """The ``count`` largest logits of each row where they are on the host: tokens, and logits if these are, too.

        Raises:
            ConfigError: they are on other ranks.
        """
        whole = self._whole or self
        if whole._top is None or whole._top.each < count:
            if whole._top is not None and whole._logits is None:
                raise ConfigError(
                    f"a drafter reads the {count} likeliest tokens of each row and its top_k is {whole._top.each}; "
                    "set `top_k` to the number that it reads"
                )
            if whole._top is None or whole._top.each < self.given.shape[-1]:
                return None
        each, tokens, logits = whole._top
        count = min(count, each)
        places = range(len(tokens) // each) if self._places is None else self._places
        firsts = [place * each for place in places]
        return [tokens[at : at + count] for at in firsts], [logits[at : at + count] for at in firsts if logits]

    @property
    def given(self) -> torch.Tensor:
        """[R, V] the logits.

        Raises:
            ConfigError: they are on other ranks.
        """
        if self.logits is None:
            raise ConfigError("logits are not exchanged under parallel='rows'; a drafter may read the likeliest tokens")
        return self.logits

    @property
    def _source(self) -> tuple[torch.Tensor | Stored, Sequence[int] | None]:
        """Logits, as the native library reads them if it can, and which of their rows these are; None for all."""
        whole = self._whole or self
        return whole.given if whole._stored is None else whole._stored, self._places

    def _cut(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor of the whole forward that are these."""
        places = self._places
        if places is None:
            return whole
        return whole[places.start : places.stop] if type(places) is range else device_copies.pick(whole, places)

    def logprobs(self, path: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of the token after each row of the path and of the ``top`` likeliest, from raw logits."""
        logits = self.given[[self.place(row) for row in path]]
        logits = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
        own = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        best = logits.topk(min(top, logits.shape[-1]), -1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [
            TokenLogprobs(token, value, tuple(zip(*pair, strict=True)))
            for token, value, pair in zip(tokens, own, pairs, strict=True)
        ]


def _taken(values: Any, places: Sequence[int] | None) -> Any:
    """Those of a list at some places; None for all."""
    if values is None or places is None:
        return places if values is None else values
    return values[places.start : places.stop] if type(places) is range else [values[place] for place in places]


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
