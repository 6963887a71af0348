"""What is read of a row of scores on a CPU: its largest ones, or a draw from them, in one look at it.

Each function says None where the compiled library is not there or does not read such scores; then torch has to.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64

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
    return None if found is None else [row.tolist() for row in found[0]]


def weighed(
    scores: torch.Tensor, rows: Sequence[int] | None, count: int
) -> tuple[list[array[int]], list[array[float]]] | None:
    """The same, "q", and the scores there, "f"."""
    if not _reads(scores):
        return None
    number, size = len(scores) if rows is None else len(rows), scores.shape[-1]
    count = min(count, size)
    places, values = array("q", bytes(8 * number * count)), array("f", bytes(4 * number * count))
    wanted = None if rows is None else (c_int64 * number)(*rows)
    found = places.buffer_info()[0], values.buffer_info()[0]
    library().specdec_top(scores.data_ptr(), wanted, number, size, _HALF[scores.dtype], count, *found)
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


def rank(
    known: Sequence[tuple[array[int], array[float]]], temperature: float, key: int, count: int
) -> tuple[list[int], list[float]] | None:
    """The ``count`` likeliest winners of a draw by the Gumbel numbers that a key gives, and their sums.

    What is drawn from, and the order, are those of :meth:`specdec.sampling.Noise.ranked`.
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
