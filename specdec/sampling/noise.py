"""Random numbers for draws, keyed by position.

A token for position p is drawn as ``argmax(log-probabilities + Gumbel(seed, p))`` (the Gumbel-max trick), with noise
that is a function of seed, position and token alone. So the text at a seed is a property of the model and the seed:
any drafter, and none, gives the same (Daliri, Musco and Suresh 2024, arXiv 2408.07978). The noise is a counter hash
(SplitMix64) in integer arithmetic and the same on every device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cached_property

import torch

from specdec.native.scores import Stored, chances, draw, rank
from specdec.sampling.scores import no_distribution
from specdec.step import device_copies

__all__ = ["Noise"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BLOCK = 1 << 15  # numbers of noise that are made at once, for as many positions as that is
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
        if device_copies.is_apart(self._steps.device):  # a number among a kernel's arguments is no copy to the device
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
        if self._block > 1 or device_copies.is_apart(scores.device):
            sums = self.gumbel(position) + scores
            value, place = (sums if among is None else sums[among]).max(-1)
            if not math.isfinite(value.item()):
                raise no_distribution(scores)
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
            raise no_distribution(scores)
        near = (scores >= least - 0.01 - 1e-6 * abs(least)).nonzero()[:, 0]  # by more than rounding too many
        return int(near[(_gumbel(numbers[near]) + scores[near]).argmax()])

    def draw(self, probabilities: torch.Tensor, position: int, stream: int, index: int = 0) -> int:
        """A token from ``probabilities`` [V] (unnormalised is fine)."""
        return int(self.draws(probabilities[None], position, stream, [index]))

    def draws(self, probabilities: torch.Tensor, position: int, stream: int, indices: Sequence[int]) -> torch.Tensor:
        """int64 [N] on the device: what ``draw`` takes from each row of ``probabilities`` [N, V] with its index."""
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
