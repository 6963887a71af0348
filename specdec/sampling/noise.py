"""Random numbers for draws, keyed by position.

A token for position p is drawn as ``argmax(log-probabilities + Gumbel(seed, p))`` (the Gumbel-max trick), with noise
that is a function of seed, position and token alone. So the text at a seed is a property of the model and the seed:
it is the same with any drafter and without one (Daliri, Musco and Suresh 2024, arXiv 2408.07978). The noise is a
counter hash (SplitMix64) in integer arithmetic, equal on every device.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from specdec.native.scores import chances, draw, rank
from specdec.step import device_copies
from specdec.step.step_output import no_distribution

__all__ = ["Noise", "inverse_bits", "key_at"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BLOCK = 1 << 15  # random numbers that are made at once, which sets for how many positions
_AHEAD = 16  # most positions of a block: keys are made one by one, and a text may end soon


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def key_at(start: int, position: int) -> int:
    """The 64-bit key of the Gumbel noise of the target's draw at a position; ``start``: of :attr:`Noise.start`."""
    return _mix(_mix((start + position * _GOLDEN) & _MASK))


def inverse_bits(temperature: float) -> int:
    """The bits of a float32, the inverse of a temperature; 0 where there is none."""
    if not 1e-30 < temperature < 1e30:
        return 0
    return int(np.float32(1 / np.float32(temperature)).view(np.int32))


class Noise:
    """Random numbers that are a function of (seed, stream, position, index) alone.

    Streams separate uses. Stream 0 is the target's draws, one per position of the text. Draws that a step may discard
    (a drafter's, the coins of rejection) must use another stream, keyed by the step's first position, which no other
    step has: a number that was read and thrown away must never decide again.

    Attributes:
        waits: whether each number that the host reads of what is drawn from is a wait for a device.
    """

    TARGET, DRAFT, COIN = 0, 1, 2

    def __init__(self, seed: int, size: int, device: torch.device) -> None:
        self._seed = _mix(seed & _MASK)
        self._device, self.waits = device, device_copies.is_apart(device)
        self._tokens: torch.Tensor | None = None  # the tokens that have noise; None for all
        self._size, self._block = size, max(1, min(_AHEAD, _BLOCK // size))
        self._ahead: dict[int, torch.Tensor] = {}  # block of positions -> noise of the target's draws

    def among(self, tokens: torch.Tensor) -> Noise:
        """The same noise for ``tokens`` [d] only."""
        own = Noise(0, len(tokens), self._device)
        own._seed, own._tokens = self._seed, tokens.long().contiguous()
        return own

    @cached_property
    def _steps(self) -> torch.Tensor:
        """[V] int64; the product wraps at 64 bits, as the hash needs."""
        tokens = torch.arange(self._size, device=self._device) if self._tokens is None else self._tokens
        return (tokens + 1) * _signed(_GOLDEN)

    def _key(self, position: int, stream: int, index: int) -> int:
        key = _mix((self._seed + stream * _GOLDEN) & _MASK)
        return _mix((_mix((key + position * _GOLDEN) & _MASK) + index * _GOLDEN) & _MASK)

    def key(self, position: int) -> int:
        """The 64-bit key of the Gumbel noise of the target's draw at a position."""
        return key_at(self.start, position)

    @property
    def start(self) -> int:
        """What the keys of the target's draws at all positions follow from, see :func:`key_at`; signed, of 64 bits."""
        return _signed(_mix((self._seed + Noise.TARGET * _GOLDEN) & _MASK))

    def uniform(self, position: int, stream: int, index: int = 0) -> float:
        """One number in (0, 1)."""
        return ((_mix(self._key(position, stream, index) + _GOLDEN & _MASK) >> 11) + 0.5) * 2.0**-53

    def gumbel(self, position: int, stream: int = TARGET, index: int = 0) -> torch.Tensor:
        """[V] float64, one standard Gumbel number per token. Read only: callers share it."""
        if stream != Noise.TARGET or index:
            return self._gumbel([self._key(position, stream, index)])[0]
        number, place = divmod(position, self._block)
        if number not in self._ahead:
            # The target draws at consecutive positions, and noise for a few costs little more than for one. A draft
            # reads noise ahead of the text, so the previous block is kept.
            self._ahead = {known: block for known, block in self._ahead.items() if known == number - 1}
            first = number * self._block
            self._ahead[number] = self._gumbel([self._key(first + after, stream, 0) for after in range(self._block)])
        return self._ahead[number][place]

    def gumbel_at(self, positions: torch.Tensor) -> torch.Tensor:
        """[K, V] noise of the target's draws at int64 [K] positions, which stay on their device."""
        return self._gumbel_of(self.starts_at(positions))

    def starts_at(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [K] what the target's draws at positions follow from, whatever the seed."""
        return positions * _signed(_GOLDEN) + self.start

    def gumbel_from(self, start: torch.Tensor, count: int) -> torch.Tensor:
        """[count, V] noise of the target's draws at consecutive positions; ``start``: int64 [1], of the first one.

        The seed is that of ``start``, so recorded work may call it for any text.
        """
        return self._gumbel_of(start + torch.arange(count, device=start.device) * _signed(_GOLDEN))

    def _gumbel_of(self, starts: torch.Tensor) -> torch.Tensor:
        """[K, V]; ``starts`` is overwritten."""
        keys = _hashed(_hashed(starts))
        return _gumbel(_mixed(self._steps + keys[:, None]))

    def _gumbel(self, keys: Sequence[int]) -> torch.Tensor:
        """[K, V] float64 Gumbel numbers for K keys."""
        signed = [_signed(key) for key in keys]
        if self.waits:  # a Python number becomes a kernel's argument, without a copy
            return _gumbel(_mixed(torch.stack([self._steps + key for key in signed])))
        return _gumbel(_mixed(self._steps + torch.tensor(signed)[:, None]))

    def drawn(self, scores: torch.Tensor, position: int, temperature: float = 1.0) -> int | None:
        """The token that the native library draws from scores [V] over a temperature; None where it cannot decide."""
        return draw(scores, self.key(position), temperature)

    def ranked(
        self, known: Sequence[tuple[array[int], array[float]]], temperature: float, position: int, count: int
    ) -> tuple[list[int], list[float]]:
        """The likeliest outcomes of the target's draw at a position, if it draws from the mean of known distributions.

        Returns the ``count`` tokens with the largest sums of log-probability and noise, the largest first, and these
        sums. It is for a drafter that knows a few tokens, and runs on the host whatever the device is.

        Args:
            known: at least one pair of distinct tokens, "q", and their scores, "f", largest first. Scores over the
                temperature are log-probabilities up to a constant; -inf is never drawn.
        """
        key = self.key(position)
        if (ranks := rank(known, temperature, key, count)) is not None:
            return ranks
        shares: dict[int, float] = {}
        for tokens, scores in known:
            odds = [math.exp((score - scores[0]) / temperature) for score in scores]
            expected = sum(odds) * len(known)
            for token, odd in zip(tokens, odds, strict=True):
                shares[token] = shares.get(token, 0.0) + odd / expected
        numbers = torch.tensor([token for token, share in shares.items() if share > 0], dtype=torch.int64)
        noise = _gumbel(_mixed((numbers + 1) * _signed(_GOLDEN) + _signed(key)))
        sums = noise + torch.tensor([share for share in shares.values() if share > 0], dtype=torch.float64).log()
        sums, order = sums.sort(descending=True, stable=True)
        return numbers[order[:count]].tolist(), sums[:count].tolist()

    def foreseen(
        self, scores: torch.Tensor, position: int, temperature: float, count: int
    ) -> tuple[list[list[int]], list[list[float]]] | None:
        """Per row of scores [R, V] or [V], the likeliest outcomes of the target's draws at ``position`` and after it.

        A token's probability is the softmax of the temperature times the sum of scores and noise. It is for drafters:
        the last digits of the noise differ from :meth:`gumbel`.

        Returns:
            Per row the places of the ``count`` likeliest, likeliest first, and their probabilities; None where the
            native library cannot compute them.
        """
        rows = len(scores) if scores.dim() > 1 else 1
        keys = [self._key(position + row, Noise.TARGET, 0) for row in range(rows)]
        return chances(scores, count, scale=temperature, noise=temperature, keys=keys, tokens=self._tokens)

    def winner(self, scores: torch.Tensor, position: int, among: torch.Tensor | None = None) -> int:
        """A draw from ``scores`` [V]: the token with the largest sum of its score and its noise at a position.

        ``among``: int64, the only tokens that may be drawn, ascending, with finite scores; None for all.

        Raises:
            NumericalError: the scores are no distribution.
        """
        if among is None and (token := self.drawn(scores, position)) is not None:
            return token
        if self._block > 1 or self.waits:
            sums = self.gumbel(position) + scores
            value, place = (sums if among is None else sums[among]).max(-1)
            if not math.isfinite(value.item()):
                raise no_distribution(scores)
            return int(place if among is None else among[place])
        # For a large vocabulary the noise costs more than the rest of this function.
        key = _signed(self.key(position))
        if among is not None:
            return int(among[(_gumbel(_mixed(self._steps[among] + key)) + scores[among]).argmax()])
        # Only tokens that would reach the likeliest one's sum with the largest noise there is need logarithms.
        numbers = _mixed(self._steps + key)
        best, likeliest = scores.max(-1)
        own, largest = _gumbel(torch.stack((numbers[likeliest], numbers.max()))).tolist()
        least = best.item() + own - largest
        if not math.isfinite(least):
            raise no_distribution(scores)
        near = (scores >= least - 0.01 - 1e-6 * abs(least)).nonzero()[:, 0]  # with a margin larger than rounding
        return int(near[(_gumbel(numbers[near]) + scores[near]).argmax()])

    def draw(self, probabilities: torch.Tensor, position: int, stream: int, index: int = 0) -> int:
        """A token drawn from ``probabilities`` [V], which need not be normalised."""
        return int(self.draws(probabilities[None], position, stream, [index]))

    def draws(self, probabilities: torch.Tensor, position: int, stream: int, indices: Sequence[int]) -> torch.Tensor:
        """int64 [N] on the device: per row of ``probabilities`` [N, V] the result of ``draw`` for its index."""
        noise = self._gumbel([self._key(position, stream, index) for index in indices])
        return (probabilities.double().log() + noise).argmax(-1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The upper 53 bits of the hash of 64-bit numbers, as int64; ``x`` is overwritten."""
    x = _hashed(x)
    x >>= 11
    x &= _MASK >> 11
    return x


def _hashed(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's hash of 64-bit numbers; ``x`` is overwritten."""
    shifted = torch.empty_like(x)
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, None)):
        torch.bitwise_right_shift(x, shift, out=shifted)  # an arithmetic shift; the mask makes it a logical one
        x ^= shifted.bitwise_and_(_MASK >> shift)
        if factor is not None:
            x *= _signed(factor)
    return x


def _gumbel(x: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers, float64, of hashes; a larger hash gives a larger number."""
    return x.double().add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_()
