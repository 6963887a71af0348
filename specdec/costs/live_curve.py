"""Live costs: a cost curve that is adapted to the latest forwards.

A curve is measured within a second, and the machine may differ a minute later. Where other processes compute on the
same chip, memory may be slower and arithmetic faster than during the measurement, or the reverse, so that eight rows
take 1.15 plain steps instead of 1.55. So each forward of a generation is compared with the curve, and the curve is bent
towards the latest forwards: strongly for the numbers of rows that were run, and less for the others.

On a device a forward is launched and not waited for, so what is compared there is whole steps less their drafting:
verification, draws and copies are in the prices of rows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from specdec.costs.curve import BUCKET, CostCurve

__all__ = ["LiveCosts"]

_BINS = 8  # to a doubling of the rows
_MOST = 256  # rows that have bins
_FIRST, _EVERY = 16, 32  # forwards until the curve is bent, at first and later; then all prices are read again
_MEMORY = 0.98  # weight of the past, from one forward to the next: some fifty forwards count
_NEAR, _FAR = 0.1, 0.25  # widths of the narrow and the wide kernel, in doublings of the rows
_WEIGHT = 2.0  # weight of the wide kernel's mean, in forwards
_OUTLIER = math.log(1.5)  # a larger difference from the expected time is cut to this: another process interfered
_SOME = 5  # forwards of the same number of rows from which their median is the expected time

_COUNTS = np.unique(np.round(2 ** (np.arange(_BINS * int(math.log2(_MOST)) + 1) / _BINS)).astype(int))
_APART = np.abs(np.log2(_COUNTS)[:, None] - np.log2(_COUNTS)[None, :])
_OWN, _WIDE = np.exp(-0.5 * (_APART / _NEAR) ** 2), 1 / (1 + (_APART / _FAR) ** 2)
_BIN_OF = np.abs(np.arange(_MOST + 1)[:, None] - _COUNTS[None, :]).argmin(1).tolist()


class LiveCosts:
    """A measured curve, and the same curve adapted to the latest forwards.

    Args:
        measured: the measured curve.

    Attributes:
        now: the adapted curve; a new object whenever it changes.
    """

    def __init__(self, measured: CostCurve) -> None:
        self.measured = self.now = measured
        self._rows = np.union1d(_COUNTS, measured.rows)
        most = int(self._rows[-1])
        self._times = np.array([measured.at(length, most) for length in measured.lengths])[:, self._rows]
        self._due: dict[int, list[float]] = {}  # see _expected, by length // BUCKET
        self._latest: list[tuple[int, int, float]] = []  # rows, length and seconds of forwards since the last bend
        self._wait = _FIRST
        self._weights = np.zeros(len(_COUNTS))
        self._sums = np.zeros(len(_COUNTS))
        self._bent = np.zeros(len(_COUNTS))  # per bin, log(actual time / measured time)

    def seconds(self, rows: int, length: int) -> float:
        """Seconds of a forward of ``rows`` rows after about ``length`` tokens, now."""
        return self.now.near(length, rows).seconds[rows]

    def measured_seconds(self, rows: int, length: int) -> float:
        """The same when the curve was measured."""
        return self.measured.near(length, rows).seconds[rows]

    def note(self, rows: int, length: int, seconds: float) -> None:
        """Record the seconds of a forward of ``rows`` rows after ``length`` tokens."""
        if 0 < rows <= _MOST and seconds > 0:
            self._latest.append((rows, length, seconds))  # cheap on purpose: a forward has evicted the CPU's caches
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
        """Logarithms of the measured seconds of 0, 1, ... rows after about ``length`` tokens."""
        bucket = length // BUCKET
        due = self._due.get(bucket)
        if due is None:
            times = self.measured.at(bucket * BUCKET + BUCKET // 2, _MOST)
            due = self._due[bucket] = [0.0, *map(math.log, times[1:])]
        return due
