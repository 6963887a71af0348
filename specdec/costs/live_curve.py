"""Live costs: a cost curve that follows what forwards take now.

A curve is measured within a second, and a machine is not the same a minute later. Where others compute on the same
chip, the memory that a step of one row waits for may be slower and the arithmetic of eight rows faster than they were,
or the other way round, so that eight rows take 1.15 plain steps instead of 1.55. So each forward of a generation is
compared with the curve, and the curve is bent to the latest ones: near the rows that were run by what these took, and
elsewhere by what the nearest ones did.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from specdec.costs.curve import CostCurve

__all__ = ["LiveCosts"]

_BINS = 8  # to a doubling of the rows
_MOST = 256  # rows that have bins of their own
_FIRST, _EVERY = 16, 32  # forwards after which the curve is bent, at first and later: all prices are then read anew
_MEMORY = 0.98  # weight of the past, from one forward to the next: some fifty forwards count
_NEAR, _FAR = 0.1, 0.25  # doublings of the rows within which a forward tells of others, and within which of most
_WEIGHT = 2.0  # forwards that what the nearest ones tell counts as, beside the forwards of such rows themselves
_OUTLIER = math.log(1.5)  # what a forward may differ from what was expected: more was another process
_SOME = 5  # forwards of the same rows, of which the median one is what was to be expected
_BUCKET = 256  # tokens of context for which the curve is read once

_COUNTS = np.unique(np.round(2 ** (np.arange(_BINS * int(math.log2(_MOST)) + 1) / _BINS)).astype(int))
_APART = np.abs(np.log2(_COUNTS)[:, None] - np.log2(_COUNTS)[None, :])
_OWN, _WIDE = np.exp(-0.5 * (_APART / _NEAR) ** 2), 1 / (1 + (_APART / _FAR) ** 2)
_BIN_OF = np.abs(np.arange(_MOST + 1)[:, None] - _COUNTS[None, :]).argmin(1).tolist()


class LiveCosts:
    """A curve, and the same curve as it is now.

    Args:
        measured: as it was.
        follows: whether the seconds that are noted are those of forwards. On a GPU they are what a forward takes to
            launch, and the curve stays as it was measured.

    Attributes:
        now: the curve that the latest forwards make of it, a new one whenever it changes.
    """

    def __init__(self, measured: CostCurve, *, follows: bool = True) -> None:
        self._follows = follows
        self.measured = self.now = measured
        self._rows = np.union1d(_COUNTS, measured.rows)
        most = int(self._rows[-1])
        self._times = np.array([measured.at(length, most) for length in measured.lengths])[:, self._rows]
        self._due: dict[int, list[float]] = {}  # see _expected; by context
        self._latest: list[tuple[int, int, float]] = []  # forwards since the curve was bent, as they were noted
        self._wait = _FIRST
        self._weights = np.zeros(len(_COUNTS))
        self._sums = np.zeros(len(_COUNTS))
        self._bent = np.zeros(len(_COUNTS))  # logarithm of what forwards take by what the curve says

    def seconds(self, rows: int, length: int) -> float:
        """What a forward of so many rows takes now after about ``length`` tokens."""
        return _read(self.now, rows, length)

    def measured_seconds(self, rows: int, length: int) -> float:
        """What it took when the curve was measured."""
        return _read(self.measured, rows, length)

    def note(self, rows: int, length: int, seconds: float) -> None:
        """Take note of a forward of so many rows after ``length`` tokens."""
        if self._follows and 0 < rows <= _MOST and seconds > 0:
            self._latest.append((rows, length, seconds))  # and no more: a forward has driven all else out of the caches
            if len(self._latest) == self._wait:
                self._bend()

    def _bend(self) -> None:
        bins, past = np.array([_BIN_OF[rows] for rows, _, _ in self._latest]), _MEMORY**self._wait
        logs = np.array([math.log(seconds) - self._expected(length)[rows] for rows, length, seconds in self._latest])
        expected = self._bent[bins] if self._weights.any() else np.full(len(bins), np.median(logs))
        for own in (bins == one for one in np.flatnonzero(np.bincount(bins) >= _SOME)):
            expected[own] = np.median(logs[own])
        apart = np.clip(logs, expected - _OUTLIER, expected + _OUTLIER)
        weights = _MEMORY ** np.arange(self._wait - 1, -1, -1)
        self._weights = past * self._weights + np.bincount(bins, weights, len(_COUNTS))
        self._sums = past * self._sums + np.bincount(bins, weights * apart, len(_COUNTS))
        wide = (_WIDE @ self._sums) / (_WIDE @ self._weights)
        self._bent = (_OWN @ self._sums + _WEIGHT * wide) / (_OWN @ self._weights + _WEIGHT)
        self._latest.clear()
        self._wait = min(2 * self._wait, _EVERY)
        factors = np.exp(np.interp(np.log2(self._rows), np.log2(_COUNTS), self._bent))
        self.now = replace(self.measured, rows=self._rows.tolist(), seconds=(self._times * factors).tolist())

    def _expected(self, length: int) -> list[float]:
        """The logarithms of what forwards of 0, 1, ... rows take after about ``length`` tokens by the curve."""
        bucket = length // _BUCKET
        due = self._due.get(bucket)
        if due is None:
            times = self.measured.at(bucket * _BUCKET + _BUCKET // 2, _MOST)
            due = self._due[bucket] = [0.0, *map(math.log, times[1:])]
        return due


def _read(curve: CostCurve, rows: int, length: int) -> float:
    return curve.reading(length // _BUCKET * _BUCKET + _BUCKET // 2, rows).seconds[rows]
