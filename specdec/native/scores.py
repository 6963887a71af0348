"""Reading rows of scores on a CPU: their largest scores, or a draw from them, in one pass.

Each function returns None where the compiled library is missing or cannot read such scores; torch must then do it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64, c_uint64
from typing import NamedTuple

import torch

from specdec.native.library import library

__all__ = ["Stored", "chances", "draw", "rank", "weighed"]

_HALF = {torch.float32: False, torch.bfloat16: True}


class Stored(NamedTuple):
    """The address of score rows in memory, for the library; the owner of this object keeps that memory alive.

    The shape and dtype are fields here, as asking a tensor for them costs time: after a pass over the weights, torch's
    code is in no cache, and each question takes as long as reading a row of scores.

    Attributes:
        address: address of the first row.
        rows, size: shape [rows, size] of the scores.
        half: whether the scores are bfloat16; else float32.
    """

    address: int
    rows: int
    size: int
    half: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape, under a tensor's name for it."""
        return self.rows, self.size

    def part(self, first: int, rows: int) -> Stored:
        """``rows`` rows, from row ``first`` on."""
        address = self.address + first * self.size * (2 if self.half else 4)
        return Stored(address, rows, self.size, self.half)


def _stored(scores: torch.Tensor | Stored) -> Stored | None:
    """The address of scores [R, V] or [V]; None where the library cannot read them."""
    if isinstance(scores, Stored):
        return scores
    if scores.dtype not in _HALF or scores.device.type != "cpu" or not scores.is_contiguous() or library() is None:
        return None
    return Stored(scores.data_ptr(), len(scores) if scores.dim() > 1 else 1, scores.shape[-1], _HALF[scores.dtype])


def weighed(
    scores: torch.Tensor | Stored, rows: Sequence[int] | None, count: int
) -> tuple[list[array[int]], list[array[float]]] | None:
    """Tokens, as arrays "q", and scores, as arrays "f", of each row's ``count`` largest scores, largest first.

    ``rows``: of [R, V], None for all. Of equal scores the first comes first; NaN comes before all numbers.
    """
    if (stored := _stored(scores)) is None:
        return None
    number, count = stored.rows if rows is None else len(rows), min(count, stored.size)
    places, values = array("q", bytes(8 * number * count)), array("f", bytes(4 * number * count))
    wanted, given = None if rows is None else (c_int64 * number)(*rows), (stored.size, stored.half, count)
    found = [own.buffer_info()[0] for own in (places, values)]
    library().specdec_top(stored.address, wanted, number, *given, *found)
    if number == 1:
        return [places], [values]
    firsts = range(0, number * count, count)
    return [places[first : first + count] for first in firsts], [values[first : first + count] for first in firsts]


def chances(
    scores: torch.Tensor | Stored,
    count: int,
    *,
    scale: float = 1.0,
    noise: float = 0.0,
    keys: Sequence[int] = (),
    tokens: torch.Tensor | None = None,
) -> tuple[list[list[int]], list[list[float]]] | None:
    """The tokens of the ``count`` largest logits in each row of scores [R, V] or [V], and their probabilities.

    A logit is a score times ``scale``. Where each row has a 64-bit key, ``noise`` times a Gumbel number is added, which
    depends on the key and the token: its index, or its entry in ``tokens`` [V], int64.

    Raises:
        ValueError: the number of ``tokens`` is not V, or the number of keys is not R.
    """
    if (stored := _stored(scores)) is None:
        return None
    if (tokens is not None and len(tokens) != stored.size) or (keys and len(keys) != stored.rows):
        given = None if tokens is None else len(tokens)
        raise ValueError(f"{len(keys)} keys and {given} tokens for scores {stored.shape}; give one a row, one a place")
    number, count = stored.rows, min(count, stored.size)
    best, shares = (c_int64 * (number * count))(), (c_float * (number * count))()
    library().specdec_chances(
        stored.address,
        number,
        stored.size,
        stored.half,
        scale,
        noise,
        (c_uint64 * number)(*keys) if keys else None,
        None if tokens is None else tokens.data_ptr(),
        count,
        best,
        shares,
    )
    firsts = range(0, number * count, count)
    return [best[first : first + count] for first in firsts], [shares[first : first + count] for first in firsts]


def draw(scores: torch.Tensor | Stored, key: int, temperature: float = 1.0) -> int | None:
    """The token with the largest sum of its score in [V] and its Gumbel number under a 64-bit key.

    Scores are divided by the temperature in float32. None, too, where the scores are not a distribution, or where two
    sums are so close that rounding decides.
    """
    if (stored := _stored(scores)) is None:
        return None
    token: int = library().specdec_draw(stored.address, stored.size, stored.half, temperature, key)
    return None if token < 0 else token


def rank(
    known: Sequence[tuple[array[int], array[float]]], temperature: float, key: int, count: int
) -> tuple[list[int], list[float]] | None:
    """The ``count`` tokens that are most likely to win a draw with a key's Gumbel numbers, and their sums.

    The candidates and their order are those of :meth:`specdec.sampling.noise.Noise.ranked`.
    """
    if library() is None:
        return None
    tokens, scores = known[0]
    for more, theirs in known[1:]:
        tokens, scores = tokens + more, scores + theirs
    sizes, best, sums = array("q", [len(own) for own, _ in known]), array("q", tokens), (c_double * len(tokens))()
    given = (one.buffer_info()[0] for one in (tokens, scores, sizes))
    found = library().specdec_rank(*given, len(known), temperature, key, count, best.buffer_info()[0], sums)
    return best[:found].tolist(), sums[:found]
