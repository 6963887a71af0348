"""From logits to tokens: parameters, logits processors on each node's own prefix, and noise keyed by position.

Noise. A token for position p is drawn as ``argmax(log-probabilities + Gumbel(seed, p))`` (the Gumbel-max trick), with
noise that is a function of seed, position and token alone. So the text at a seed is a property of the model and the
seed: any drafter, and none, gives the same (Daliri, Musco and Suresh 2024, arXiv 2408.07978). The noise is a counter
hash (SplitMix64) in integer arithmetic and the same on every device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from specdec import copies
from specdec.errors import NumericalError
from specdec.grammar import Grammar, States
from specdec.native.scores import Stored, chances, draw, largest, rank, weighed
from specdec.params import ACCEPTANCES, SamplingParams
from specdec.processors import FREE, check_scores, judged, masked, name_of, takes_rows
from specdec.results import TokenLogprobs

__all__ = ["ACCEPTANCES", "Noise", "Peaks", "Sampler", "SamplingParams", "Scores"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BLOCK = 1 << 15  # numbers of noise that are made at once, for as many positions as that is
_UNSOUND = -1  # in the place of a token where logits are no distribution
_AHEAD = 16  # positions, at most: their keys are made one by one, and a text may end soon


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


class Noise:
    """Random numbers that are a function of (seed, stream, position, index) alone.

    Streams keep uses apart: stream 0 is the target's own draws, one per position of the text. Draws that a step may
    discard (a drafter's, rejection's coins) must use another stream, keyed by the step's first position, which no other
    step has: a number that has been looked at and thrown away must never decide again.
    """

    TARGET, DRAFT, COIN = 0, 1, 2

    def __init__(self, seed: int, size: int, device: torch.device) -> None:
        self._seed = _mix(seed & _MASK)
        self._device = device
        self._tokens: torch.Tensor | None = None  # those that it is of; all for None
        self._size, self._block = size, max(1, min(_AHEAD, _BLOCK // size))
        self._ahead: dict[int, torch.Tensor] = {}  # the target's draws, by block of positions

    def among(self, tokens: torch.Tensor) -> Noise:
        """The same numbers, of ``tokens`` [d] alone."""
        own = Noise(0, len(tokens), self._device)
        own._seed, own._tokens = self._seed, tokens.long().contiguous()
        return own

    @cached_property
    def _steps(self) -> torch.Tensor:
        """[V] int64, which wraps like the 64-bit product that it is."""
        tokens = torch.arange(self._size, device=self._device) if self._tokens is None else self._tokens
        return (tokens + 1) * _signed(_GOLDEN)

    def _key(self, position: int, stream: int, index: int) -> int:
        key = _mix((self._seed + stream * _GOLDEN) & _MASK)
        return _mix((_mix((key + position * _GOLDEN) & _MASK) + index * _GOLDEN) & _MASK)

    def key(self, position: int) -> int:
        """64 bits that the Gumbel numbers of the target's draw at a position follow from."""
        return self._key(position, Noise.TARGET, 0)

    def uniform(self, position: int, stream: int, index: int = 0) -> float:
        """One number in (0, 1)."""
        return ((_mix(self._key(position, stream, index) + _GOLDEN & _MASK) >> 11) + 0.5) * 2.0**-53

    def gumbel(self, position: int, stream: int = TARGET, index: int = 0) -> torch.Tensor:
        """[V] float64, one standard Gumbel number per token; to be read only."""
        if stream != Noise.TARGET or index:
            return self._gumbel([self._key(position, stream, index)])[0]
        number, place = divmod(position, self._block)
        if number not in self._ahead:
            # The target's draws are at one position after the other, and a few of them cost little more than one. A
            # draft looks ahead, so the block before is kept.
            self._ahead = {known: block for known, block in self._ahead.items() if known == number - 1}
            first = number * self._block
            self._ahead[number] = self._gumbel([self._key(first + after, stream, 0) for after in range(self._block)])
        return self._ahead[number][place]

    def gumbel_at(self, positions: torch.Tensor) -> torch.Tensor:
        """[K, V] the target's draws at int64 [K] positions, which are on a device and not read."""
        start = _mix((self._seed + Noise.TARGET * _GOLDEN) & _MASK)
        keys = _hashed(_hashed(positions * _signed(_GOLDEN) + _signed(start)))
        return _gumbel(_mixed(self._steps + keys[:, None]))

    def _gumbel(self, keys: Sequence[int]) -> torch.Tensor:
        """[K, V] float64 for K keys."""
        signed = [_signed(key) for key in keys]
        if copies.is_apart(self._steps.device):  # a number among a kernel's arguments is no copy to the device
            return _gumbel(_mixed(torch.stack([self._steps + key for key in signed])))
        return _gumbel(_mixed(self._steps + torch.tensor(signed)[:, None]))

    def drawn(self, scores: torch.Tensor | Stored, position: int, temperature: float = 1.0) -> int | None:
        """The winner by scores [V] over a temperature, in float32, where one look at them tells; else None."""
        return draw(scores, self.key(position), temperature)

    def ranked(
        self, known: Sequence[tuple[array[int], array[float]]], temperature: float, position: int, count: int
    ) -> tuple[list[int], list[float]]:
        """The likeliest winners of the target's draw at a position, if it draws from the mean of known distributions.

        That is the ``count`` tokens with the largest sums of the logarithm of their share and the draw's noise, the
        largest first; and these sums. For a drafter that knows a few tokens: on the host, whatever the device is.

        Args:
            known: at least one: distinct tokens, "q", and their scores, "f", largest first. These over the temperature
                are the logarithms of their shares but for a constant; -inf is never drawn.
        """
        key = self.key(position)
        if (found := rank(known, temperature, key, count)) is not None:
            return found
        shares: dict[int, float] = {}
        for tokens, scores in known:
            odds = [math.exp((score - scores[0]) / temperature) for score in scores]
            whole = sum(odds) * len(known)
            for token, odd in zip(tokens, odds, strict=True):
                shares[token] = shares.get(token, 0.0) + odd / whole
        numbers = torch.tensor([token for token, share in shares.items() if share > 0], dtype=torch.int64)
        noise = _gumbel(_mixed((numbers + 1) * _signed(_GOLDEN) + _signed(key)))
        sums = noise + torch.tensor([share for share in shares.values() if share > 0], dtype=torch.float64).log()
        sums, order = sums.sort(descending=True, stable=True)
        return numbers[order[:count]].tolist(), sums[:count].tolist()

    def foreseen(
        self, scores: torch.Tensor, position: int, temperature: float, count: int
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """By rows [R, V] or [V] of scores, the likeliest ones of the target's draws at ``position`` and the next ones.

        A token's chance is its share of a softmax of the temperature times scores and noise. For a drafter: the last
        digits of the noise are not those of :meth:`gumbel`.

        Returns:
            Of each row the places of the ``count`` likeliest, likeliest first, and their chances; None where torch has
            to find them.
        """
        rows = len(scores) if scores.dim() > 1 else 1
        keys = [self._key(position + row, Noise.TARGET, 0) for row in range(rows)]
        return chances(scores, count, scale=temperature, noise=temperature, keys=keys, tokens=self._tokens)

    def winner(self, scores: torch.Tensor, position: int, among: torch.Tensor | None = None) -> int:
        """The token with the largest sum of ``scores`` [V] and the target's draws at a position: a draw from them.

        ``among``: int64, the only tokens that count, ascending, with finite scores; None for all.

        Raises:
            NumericalError: the scores are no distribution.
        """
        if among is None and (token := self.drawn(scores, position)) is not None:
            return token
        if self._block > 1 or copies.is_apart(scores.device):
            sums = self.gumbel(position) + scores
            value, place = (sums if among is None else sums[among]).max(-1)
            if not math.isfinite(value.item()):
                raise _no_distribution(scores)
            return int(place if among is None else among[place])
        # Of a large vocabulary the numbers cost more than all else here.
        key = _signed(self.key(position))
        if among is not None:
            return int(among[(_gumbel(_mixed(self._steps[among] + key)) + scores[among]).argmax()])
        # Only those tokens need logarithms that would reach, with the largest number there is, the likeliest one's sum.
        numbers = _mixed(self._steps + key)
        best, likeliest = scores.max(-1)
        own, largest = _gumbel(torch.stack((numbers[likeliest], numbers.max()))).tolist()
        least = best.item() + own - largest
        if not math.isfinite(least):
            raise _no_distribution(scores)
        near = (scores >= least - 0.01 - 1e-6 * abs(least)).nonzero()[:, 0]  # by more than rounding too many
        return int(near[(_gumbel(numbers[near]) + scores[near]).argmax()])

    def draw(self, probabilities: torch.Tensor, position: int, stream: int, index: int = 0) -> int:
        """A token from ``probabilities`` [V] (unnormalised is fine)."""
        return int(self.draws(probabilities[None], position, stream, [index]))

    def draws(self, probabilities: torch.Tensor, position: int, stream: int, indices: Sequence[int]) -> torch.Tensor:
        """int64 [N], what ``draw`` takes from each row of ``probabilities`` [N, V] with its index, and nobody reads."""
        noise = self._gumbel([self._key(position, stream, index) for index in indices])
        return (probabilities.double().log() + noise).argmax(-1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """int64 in [0, 2^53), the upper bits of their hash, of 64-bit numbers that are used up."""
    x = _hashed(x)
    x >>= 11
    x &= _MASK >> 11
    return x


def _hashed(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's hash of 64-bit numbers, which are used up."""
    shifted = torch.empty_like(x)
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)  # keeps the sign; the mask makes it a shift of bits
        x ^= shifted.bitwise_and_(_MASK >> shift)
        if factor is not None:
            x *= _signed(factor)
    return x


def _gumbel(x: torch.Tensor) -> torch.Tensor:
    """Hashes to standard Gumbel numbers, float64; the larger, the larger."""
    return x.double().add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_()


class Processor(Protocol):
    """A logits processor in transformers' form: ([1, n] ids, [1, V] scores) to [1, V] scores."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor: ...


class Peaks:
    """The token with the largest of each row's logits: one reduction and one transfer for all rows, once asked for.

    Args:
        found: the logits [R, V], or the tokens, where they are known.
        stored: where the logits are, if the library reads them there.
        drawn: the tokens that were drawn with the logits, see :attr:`specdec.block.Block.draw`; -1 where none was.
    """

    def __init__(
        self, found: torch.Tensor | list[int], stored: Stored | None = None, drawn: Sequence[int] = ()
    ) -> None:
        self._found, self.stored, self.drawn = found, stored, drawn

    def of(self, first: int, last: int) -> list[int]:
        """Tokens of rows [first, last); -1 where a row's logits are no distribution."""
        if isinstance(self._found, torch.Tensor):
            self._found = _tokens(self._found).tolist()
        return self._found[first:last]


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
    shared: tuple[Peaks, int, int] | None = None
    processed: torch.Tensor | None = None
    _place: Mapping[int, int] | None = None
    _best: Sequence[int] = ()
    _own: Sequence[int] = ()
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
            peaks, first, last = self.shared or (Peaks(self.logits), 0, self.logits.shape[0])
            tokens = peaks.of(first, last)
            if _UNSOUND in tokens:
                raise _no_distribution(self.logits)
            self._best = tokens
        best = self._best[row if self.rows is None else self.place(row)]
        if best == _UNSOUND:
            raise _no_distribution(self.of(row))
        return best

    def own(self, row: int) -> int | None:
        """The target's own token after a row, where it was drawn with the logits, or all rows' were at once
        (``Sampler.decide``); else None.

        Raises:
            NumericalError: the row's logits are no distribution.
        """
        if not self._own:
            peaks, first, _ = self.shared or (None, 0, 0)
            token = peaks.drawn[first + self.place(row)] if peaks is not None and peaks.drawn else -1
            return None if token < 0 else token
        token = self._own[self.place(row)]
        if token == _UNSOUND:
            raise _no_distribution(self.of(row))
        return token

    def decided(
        self, best: Sequence[int], own: Sequence[int], top: Sequence[int] = (), values: Sequence[float] = ()
    ) -> None:
        """Keep what was copied from the device: the largest logit's token per row, the target's own, and ``top``.

        ``values``: the logits of the latter, or none.
        """
        self._best, self._own = best, own
        count = len(top) // len(best)
        firsts = range(0, len(top), max(count, 1))
        self._top = [list(top[start : start + count]) for start in firsts]
        self._values = [values[start : start + count] for start in firsts if values]

    def top(self, count: int) -> torch.Tensor:
        """[R, k] of each scored row the tokens with the ``count`` largest raw logits, the largest first."""
        return self.logits.topk(min(count, self.logits.shape[-1]), -1).indices

    def likeliest(self, count: int) -> list[list[int]]:
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
        if isinstance(whole, torch.Tensor) and copies.is_apart(whole.device):
            return self.likeliest(count), None
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
        super().__init__(lambda: copies.pick(whole.logits, places), numbers, _best=best, _top=top, _values=weights)

    @property
    def _source(self) -> tuple[torch.Tensor | Stored, Sequence[int]]:
        whole, places = self._whole._source
        return whole, self._places if places is None else [places[place] for place in self._places]


def _no_distribution(logits: torch.Tensor) -> NumericalError:
    return NumericalError(
        f"the model's logits are no distribution: {_said_of(logits)}; check the weights, or use float32 or bfloat16 "
        "instead of float16"
    )


def _said_of(scores: torch.Tensor) -> str:
    nan, size = int(torch.isnan(scores).sum()), scores.numel()
    return f"{nan} of {size} are NaN, the largest is {float(scores.max())}"


def _tokens(logits: torch.Tensor) -> torch.Tensor:
    """[R] int64, the largest of [R, V]."""
    values, tokens = logits.max(-1)
    return torch.where(values.abs() < math.inf, tokens, _UNSOUND)


class Sampler:
    """Turns a row's logits into a token or a distribution, under the processors, on the row's own prefix.

    Args:
        params: temperature and the rest.
        tokens: the committed text, live; its last token is the root.
        vocab_size: V.
        device: where logits arrive.
        processors: further processors (transformers' or anyone's, or a :class:`specdec.grammar.Grammar`), applied
            before those of ``params``.
        sample: draw (True) or take the largest (False); None follows the temperature.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: list[int],
        vocab_size: int,
        device: torch.device,
        processors: Sequence[Any] = (),
        sample: bool | None = None,
    ) -> None:
        self.params = params
        self.sample = params.temperature > 0 if sample is None else sample
        self.noise = Noise(params.seed, vocab_size, device)
        begun = [States(one, tokens) if isinstance(one, Grammar) else one for one in processors]
        self.processors: list[Any] = [*begun, *params.processors()]
        self._all_free = all(type(p) in FREE for p in self.processors)
        self.takes_together = all(map(takes_rows, self.processors))
        # What others are shown, and a grammar's states, are made of tokens that the host knows.
        self.reads_drafts = not self.takes_together or any(isinstance(p, States) for p in self.processors)
        last: Any = self.processors[-1] if self.processors else None
        plain = type(last) is TopPLogitsWarper and last.min_tokens_to_keep == 1 and last.filter_value == -math.inf
        plain = plain and not copies.is_apart(device)  # where every number that is read is waited for
        self._top_p: float | None = last.top_p if plain else None
        only = type(last) is TemperatureLogitsWarper and len(self.processors) == 1
        self._temperature: float | None = last.temperature if only else None if self.processors else 1.0
        self.tokens = tokens
        self._prefix = torch.zeros(1, 256, dtype=torch.long, device=device)
        self._filled = 0

    @property
    def unread(self) -> list[int] | None:
        """Tokens of the text that are not on the device yet; None where no processor asks for any."""
        return None if self._all_free else self.tokens[self._filled :]

    def together(
        self,
        logits: torch.Tensor,
        paths: torch.Tensor,
        unread: torch.Tensor | None = None,
        depths: Sequence[int] = (),
        path_of: Callable[[int], Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Logits [R, V] after all processors, where it ``takes_together``.

        Args:
            logits: [R, V], raw.
            paths: int64 [R, D], each row's tokens below the root, filled up with tokens of its text.
            unread: what :attr:`unread` lists, where it is on the device already.
            depths: the rows'; for processors beside those of ``params``.
            path_of: a row's tokens below the root, where it ``reads_drafts``.
        """
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        ids = (
            self._prefix[:, :0]
            if self._all_free
            else torch.cat((self._ids((), unread).expand(len(logits), -1), paths), 1)
        )
        lengths = [len(self.tokens) + depth for depth in depths]
        for processor in self.processors:
            if isinstance(processor, States):
                assert path_of is not None
                logits = masked(processor, self.tokens, [path_of(row) for row in range(len(logits))], logits)
            else:
                logits = judged(processor, ids, logits, lengths)
        return logits

    @property
    def next_draw(self) -> tuple[float, int] | None:
        """Temperature and key of the draw after the text, where these and the logits are all that it depends on."""
        if not self.sample or self._temperature is None:
            return None
        return self._temperature, self.noise.key(len(self.tokens))

    def decide(self, scores: Scores, depths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Two int64 [R] on the device: each scored row's largest raw logit, and the target's own token after it.

        ``depths`` are the rows', empty where nobody asks for the latter; ``scores`` are ``processed`` where there are
        processors. A row whose logits are no distribution has a number that is no token.
        """
        best = own = _tokens(scores.logits)
        if not depths:
            return best, best
        logits = scores.logits if scores.processed is None else scores.processed
        if self.sample:
            noise = {depth: self.noise.gumbel(len(self.tokens) + depth) for depth in sorted(set(depths))}
            own = _tokens(torch.stack([noise[depth] for depth in depths]) + logits)
        elif self.processors:
            own = _tokens(logits)
        return best, own

    def token(self, scores: Scores, row: int, path: Sequence[int]) -> int:
        """The target's token after ``path`` (tokens below the root), from the logits of ``row``."""
        if not self.processors and not self.sample:
            return scores.argmax(row)
        try:
            own = scores.own(row)
            if own is not None:
                return own
            if self.sample:
                return self._drawn(scores, row, path)
        except NumericalError:
            raise self._unsound(scores, row, path) from None
        value, token = self.processed(scores, row, path).max(-1)
        if not math.isfinite(value.item()):
            raise self._unsound(scores, row, path)
        return int(token)

    def _unsound(self, scores: Scores, row: int, path: Sequence[int]) -> NumericalError:
        """What is to be said of a row that is no distribution: of the model's logits, or of a processor's scores."""
        found = scores.of(row)
        name: str | None = None
        if math.isfinite(float(found.max())):
            for count, processor in enumerate(self.processors, 1):
                made = self.processed(scores, row, path, self.processors[:count])
                if math.isfinite(float(made.max())):
                    name = None
                elif name is None:
                    found, name = made, name_of(processor)
        if name is None:
            return _no_distribution(scores.of(row))
        return NumericalError(
            f"the scores after the logits processor {name} are no distribution: {_said_of(found)}, and the model's own "
            "logits are finite; it must leave at least one token a finite score, and none NaN or +inf"
        )

    def _drawn(self, scores: Scores, row: int, path: Sequence[int]) -> int:
        """A token by the target's own noise.

        Top-p sorts the vocabulary, which may take longer than a forward. Where it comes last, tokens are drawn as if it
        were not there, until one is drawn that it keeps for sure; only where rounding decides is it asked itself.
        """
        position = len(self.tokens) + len(path)
        if self._temperature is not None:
            token = self.noise.drawn(scores.row(row), position, self._temperature)
            if token is not None:
                return token
        if self._top_p is None:
            return self.noise.winner(self.processed(scores, row, path), position)
        logits = self.processed(scores, row, path, self.processors[:-1])
        shares = torch.softmax(logits.double(), -1)
        rounding = len(shares) * 2.0**-24  # of a sum of so many numbers in float32, whose total is 1
        left = 1 - self._top_p  # what the least likely tokens may have together, to be left out
        near = (shares > max(0.0, (left - rounding) / len(shares))).nonzero()[:, 0]  # all others are, for sure
        if not near.numel():
            raise _no_distribution(logits)
        while True:
            token = self.noise.winner(logits, position, near)
            value = logits[token]
            if float(shares.dot((logits < value).double()) + shares[token]) - rounding > left:
                return token
            if float(shares.dot((logits <= value).double())) + rounding > left:
                return self.noise.winner(self.processors[-1](self._prefix[:, :0], logits[None])[0], position)
            near = near[logits[near] > value]

    def probabilities(self, scores: Scores, row: int, path: Sequence[int]) -> torch.Tensor:
        """[V] float64, of the token after ``path``; NaN where logits are no distribution, which nobody has read yet."""
        return torch.softmax(self.processed(scores, row, path).double(), -1)

    def distribution(self, scores: Scores, row: int, path: Sequence[int]) -> torch.Tensor:
        """The same, whose numbers are read.

        Raises:
            NumericalError: the logits are no distribution.
        """
        probabilities = self.probabilities(scores, row, path)
        if torch.isnan(probabilities).any():
            raise self._unsound(scores, row, path)
        return probabilities

    def processed(
        self, scores: Scores, row: int, path: Sequence[int], processors: Sequence[Any] | None = None
    ) -> torch.Tensor:
        """[V] logits of ``row`` after processors saw the text up to and with ``path``; float32 or float64.

        ``processors``: some of the sampler's; None for all.
        """
        place = scores.place(row)
        if scores.processed is not None and processors is None:
            return scores.processed[place]
        logits = scores.logits[place : place + 1]
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        if not self._all_free:
            logits = logits.clone()  # they may write in place, and the raw logits go on to the drafter
        ids = self._ids(path)
        for processor in self.processors if processors is None else processors:
            given = logits
            if not isinstance(processor, States):
                logits = processor(ids, logits)
            elif copies.is_apart(logits.device):
                logits = masked(processor, self.tokens, [path], logits)
            else:
                logits = processor.process(self.tokens, path, logits)
            if not self._all_free:
                check_scores(processor, logits, given.shape)
        return logits[0]

    def _ids(self, path: Sequence[int], unread: torch.Tensor | None = None) -> torch.Tensor:
        """[1, n] the committed text and the path; only what is new since the last call is written."""
        if self._all_free:
            return self._prefix[:, :0]
        known, needed = len(self.tokens), len(self.tokens) + len(path)
        if needed > self._prefix.shape[1]:
            grown = self._prefix.new_zeros(1, 2 * needed)
            grown[:, : self._filled] = self._prefix[:, : self._filled]
            self._prefix = grown
        new = [*self.tokens[self._filled :], *path]
        if new:
            there = torch.tensor(new, device=self._prefix.device) if unread is None else unread
            self._prefix[0, self._filled : needed] = there
        self._filled = known  # the path's tokens are scratch
        return self._prefix[:, :needed]
