"""What is read of a row of scores on a CPU: its largest ones, or a draw from them, in one look at it.

Each function says None where the compiled library is not there or does not read such scores; then torch has to.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64, c_uint64
from typing import Any, NamedTuple

import torch

from specdec.native.library import library

__all__ = ["Stored", "chances", "draw", "largest", "rank", "weighed"]

_HALF = {torch.float32: False, torch.bfloat16: True}


class Found(NamedTuple):
    """Of every row the places and values of the ``each`` largest, which were found as the rows were made."""

    each: int
    places: array[int]
    values: array[float]


class Stored(NamedTuple):
    """Rows of scores where the library reads them; whoever has this holds their memory.

    What torch would say of a tensor is known here: with the weights gone by since, each question to it reads pages of
    its code that no cache holds any more, and takes as long as a row of scores.

    Attributes:
        address: of the first row.
        rows, size: they are [rows, size].
        half: in bfloat16, not float32.
        found: what is known of them, and of rows before them: of as many as ``first``.
    """

    address: int
    rows: int
    size: int
    half: bool
    found: Found | None = None
    first: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """As of a tensor."""
        return self.rows, self.size

    def part(self, first: int, rows: int) -> Stored:
        """Some rows, from ``first`` on."""
        address = self.address + first * self.size * (2 if self.half else 4)
        return Stored(address, rows, self.size, self.half, self.found, self.first + first)

    def known(self, rows: Sequence[int] | None, count: int) -> tuple[Found, Sequence[int]] | None:
        """Where those of its rows begin in what was found; None where fewer than ``count`` of each were."""
        if (found := self.found) is None or found.each < count:
            return None
        first, each = self.first, found.each
        if rows is None:
            return found, range(first * each, (first + self.rows) * each, each)
        return found, [(first + row) * each for row in rows]


def _stored(scores: torch.Tensor | Stored) -> Stored | None:
    """Where the library reads scores [R, V] or [V]."""
    if isinstance(scores, Stored):
        return scores
    if scores.dtype not in _HALF or scores.device.type != "cpu" or not scores.is_contiguous() or library() is None:
        return None
    return Stored(scores.data_ptr(), len(scores) if scores.dim() > 1 else 1, scores.shape[-1], _HALF[scores.dtype])


def largest(scores: torch.Tensor | Stored, rows: Sequence[int] | None, count: int) -> list[list[int]] | None:
    """The places of the ``count`` largest of [V], of some rows of ``scores`` [R, V] (None: all), the largest first.

    Of equal ones the first comes first, and NaN before all numbers.
    """
    if (stored := _stored(scores)) is None:
        return None
    number, count = stored.rows if rows is None else len(rows), min(count, stored.size)
    if (known := stored.known(rows, count)) is not None:
        places, firsts = known[0].places, known[1]
        return [places[first : first + count].tolist() for first in firsts]
    best = (c_int64 * (number * count))()
    _find(stored, rows, number, count, best, None)
    return [best[first : first + count] for first in range(0, number * count, count)]


def weighed(
    scores: torch.Tensor | Stored, rows: Sequence[int] | None, count: int
) -> tuple[list[array[int]], list[array[float]]] | None:
    """The same, "q", and the scores there, "f"."""
    if (stored := _stored(scores)) is None:
        return None
    number, count = stored.rows if rows is None else len(rows), min(count, stored.size)
    if (known := stored.known(rows, count)) is not None:
        (_, places, values), firsts = known
    else:
        places, values = array("q", bytes(8 * number * count)), array("f", bytes(4 * number * count))
        _find(stored, rows, number, count, places.buffer_info()[0], values.buffer_info()[0])
        if number == 1:
            return [places], [values]
        firsts = range(0, number * count, count)
    return [places[first : first + count] for first in firsts], [values[first : first + count] for first in firsts]


def _find(stored: Stored, rows: Sequence[int] | None, number: int, count: int, best: Any, found: int | None) -> None:
    """Have the ``number`` rows' largest written to ``best``, and their scores to ``found``."""
    wanted = None if rows is None else (c_int64 * number)(*rows)
    library().specdec_top(stored.address, wanted, number, stored.size, stored.half, count, best, found)


def chances(
    scores: torch.Tensor | Stored,
    count: int,
    *,
    scale: float = 1.0,
    noise: float = 0.0,
    keys: Sequence[int] = (),
    tokens: torch.Tensor | None = None,
) -> tuple[list[list[int]], list[list[float]]] | None:
    """The places of the ``count`` largest logits of each row of scores [R, V] or [V], and their shares of a softmax.

    A logit is a score times ``scale`` and, where each row has a key of 64 bits, ``noise`` times the Gumbel number that
    the key gives to its token: to a place's own, or one of ``tokens`` [V], int64.

    Raises:
        ValueError: there are not as many tokens as scores in a row, or keys as rows.
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
    """The token with the largest sum of its score, of [V], and the Gumbel number that a key [64 bits] gives it.

    Scores are divided by the temperature in float32. None, too, where they are no distribution or rounding decides.
    """
    if (stored := _stored(scores)) is None:
        return None
    token: int = library().specdec_draw(stored.address, stored.size, stored.half, temperature, key)
    return None if token < 0 else token


def rank(
    known: Sequence[tuple[array[int], array[float]]], temperature: float, key: int, count: int
) -> tuple[list[int], list[float]] | None:
    """The ``count`` likeliest winners of a draw by the Gumbel numbers that a key gives, and their sums.

    What is drawn from, and the order, are those of :meth:`specdec.sampling.noise.Noise.ranked`.
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
