"""What is read of a row of scores on a CPU: its largest ones, or a draw from them, in one look at it.

Each function says None where the compiled library is not there or does not read such scores; then torch has to.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int64

import torch

from specdec.native.library import library

__all__ = ["draw", "largest", "rank", "weighed"]

_HALF = {torch.float32: False, torch.bfloat16: True}


def _reads(scores: torch.Tensor) -> bool:
    return scores.dtype in _HALF and scores.device.type == "cpu" and scores.is_contiguous() and library() is not None


def largest(scores: torch.Tensor, rows: Sequence[int] | None, count: int) -> list[list[int]] | None:
    """The places of the ``count`` largest of [V], of some rows of ``scores`` [R, V] (None: all), the largest first.

    Of equal ones the first comes first, and NaN before all numbers.
    """
    found = weighed(scores, rows, count)
    return None if found is None else found[0]


def weighed(
    scores: torch.Tensor, rows: Sequence[int] | None, count: int
) -> tuple[list[list[int]], list[list[float]]] | None:
    """The same, and the scores there."""
    if not _reads(scores):
        return None
    number, size = len(scores) if rows is None else len(rows), scores.shape[-1]
    count = min(count, size)
    places, values = (c_int64 * (number * count))(), (c_float * (number * count))()
    wanted = None if rows is None else (c_int64 * number)(*rows)
    library().specdec_top(scores.data_ptr(), wanted, number, size, _HALF[scores.dtype], count, places, values)
    firsts = range(0, number * count, count)
    return [places[first : first + count] for first in firsts], [values[first : first + count] for first in firsts]


def draw(scores: torch.Tensor, key: int, temperature: float = 1.0) -> int | None:
    """The token with the largest sum of its score, of [V], and the Gumbel number that a key [64 bits] gives it.

    Scores are divided by the temperature in float32. None, too, where they are no distribution or rounding decides.
    """
    if not _reads(scores):
        return None
    half = _HALF[scores.dtype]
    token: int = library().specdec_draw(scores.data_ptr(), scores.shape[0], half, temperature, key)
    return None if token < 0 else token


def rank(tokens: array[int], scores: array[float], key: int, count: int) -> tuple[list[int], list[float]] | None:
    """The ``count`` tokens with the largest sums of their score and the Gumbel number that a key gives them; the sums.

    Both are arrays of 8 bytes a number, "q" and "d", and as long; the largest sum comes first, of equal ones the first.
    """
    if library() is None:
        return None
    count = min(count, len(tokens))
    best, sums = (c_int64 * count)(), (c_double * count)()
    given = tokens.buffer_info()[0], scores.buffer_info()[0]
    library().specdec_rank(*given, len(tokens), key, count, best, sums)
    return best[:], sums[:]
