"""Cost curve: how many seconds a forward of n rows takes after a text of a given length.

On an accelerator 64 rows may take as long as one; on a CPU eight rows may take as long as two steps.
:mod:`specdec.costs.prices` sets this time against tokens. :mod:`specdec.costs.live_curve` adapts the curve to recent
forwards. Where nothing may be measured, :func:`roofline` replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.errors import ConfigError, shown
from specdec.settings.files import write_json
from specdec.settings.validation import read_json
from specdec.target import Target

__all__ = ["BUCKET", "CostCurve", "Reading", "pass_price", "roofline"]

_PASS_SECONDS = 6e-5  # of a drafter's pass, besides its weights
_READ, _READINGS = 256, 512  # rows of a reading, or more, and readings of a curve that are kept
BUCKET = 256  # tokens of context that share one reading, see CostCurve.near
_MOST = 10**9  # rows, tokens and seconds of a curve

# Rows whose arithmetic takes as long as reading the weights once. A CPU core does some ten operations on a float32
# weight while it reads one from memory, an accelerator some hundreds on a half precision one, and a row needs two.
_BALANCE, _BALANCE_ACCELERATOR = 10, 150


class Reading(NamedTuple):
    """A curve at one length of the text.

    Attributes:
        seconds: ``seconds[n]`` is the time of a forward of n rows, or of more rows where these take less time.
        cheapest: ``cheapest[n]`` is the least that any further row adds to a forward of n rows, in seconds.
    """

    seconds: list[float]
    cheapest: list[float]


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """T(rows) at several context lengths.

    Attributes:
        machine: the machine, code and model it was measured with, see :func:`specdec.costs.measuring.describe`.
        rows: ascending; the first is 1.
        lengths: tokens in the cache, ascending.
        seconds: ``seconds[i][j]`` is the median time of a forward of ``rows[j]`` rows after ``lengths[i]`` tokens;
            all its rows have logits.
        steady: whether the measuring thread had a processor to itself; only such a curve is kept.
    """

    machine: Mapping[str, Any]
    rows: Sequence[int]
    lengths: Sequence[int]
    seconds: Sequence[Sequence[float]]
    steady: bool = True

    def __post_init__(self) -> None:
        for name, grid in (("rows", self.rows), ("lengths", self.lengths)):
            if not grid or any(after <= before for before, after in pairwise(grid)):
                raise ConfigError(f"a cost curve's {name} are {shown(list(grid), 300)}; they must ascend")
            if grid[0] < 1 or grid[-1] > _MOST:
                raise ConfigError(
                    f"a cost curve's {name} run from {grid[0]} to {shown(grid[-1])}; they must be in [1, {_MOST}]"
                )
        if self.rows[0] != 1:
            raise ConfigError(f"a cost curve's rows begin with {self.rows[0]}; they must begin with 1")
        shape = [len(row) for row in self.seconds]
        if shape != [len(self.rows)] * len(self.lengths) or not all(0 < t < _MOST for row in self.seconds for t in row):
            raise ConfigError(
                f"a cost curve needs {len(self.rows)} positive times for each of {len(self.lengths)} lengths, "
                f"got {shape}; measure it anew with `specdec tune`"
            )

    @property
    def now(self) -> CostCurve:
        """The curve itself, so that it can stand in for a :class:`specdec.costs.live_curve.LiveCosts`."""
        return self

    @cached_property
    def _readings(self) -> dict[tuple[int, int], Reading]:
        """Readings by length and rows, shared by all sequences."""
        return {}

    def at(self, length: int, most: int) -> npt.NDArray[np.float64]:
        """Seconds of 0 .. ``most`` rows after ``length`` tokens, by linear interpolation and extrapolation.

        Where only a few rows were measured, a forward was bound by reading the weights, and its slope says nothing
        about the arithmetic of more rows. Then the slope is at least the roofline's.
        """
        grid, lengths = np.asarray(self.seconds, dtype=np.float64), self.lengths
        if len(lengths) == 1:
            seconds = grid[0]
        else:
            right = min(max(int(np.searchsorted(lengths, length)), 1), len(lengths) - 1)
            share = (length - lengths[right - 1]) / (lengths[right] - lengths[right - 1])
            share = max(share, 0.0)  # below the shortest, the shortest: a line could end below nothing
            seconds = grid[right - 1] + share * (grid[right] - grid[right - 1])
        wanted, last = np.arange(most + 1), self.rows[-1]
        values: npt.NDArray[np.float64] = np.interp(wanted, self.rows, seconds)
        if most > last:
            slope = max(seconds[-1] - seconds[-2], 0.0) / (last - self.rows[-2]) if last > 1 else 0.0
            if last < _BALANCE:
                slope = max(slope, seconds[0] / _BALANCE)
            beyond = wanted > last
            values[beyond] = seconds[-1] + slope * (wanted[beyond] - last)
        values[0] = 0.0
        return values

    def reading(self, length: int, most: int) -> Reading:
        """The curve after ``length`` tokens, for forwards of up to ``most`` rows or more."""
        size = max(_READ, 1 << most.bit_length())  # enough for nearly all callers, so that the curve is seldom read
        known = self._readings.get((length, size))
        if known is None:
            seconds = np.minimum.accumulate(self.at(length, size)[::-1])[::-1]
            cheapest = np.minimum.accumulate((seconds[1:] - seconds[:-1])[::-1])[::-1]
            if len(self._readings) == _READINGS:
                self._readings.clear()
            known = self._readings[length, size] = Reading(seconds.tolist(), [*cheapest.tolist(), math.inf])
        return known

    def near(self, length: int, most: int) -> Reading:
        """As :meth:`reading`, at a length that all texts of about ``length`` tokens share."""
        return self.reading(length // BUCKET * BUCKET + BUCKET // 2, most)

    def steps(self, length: int, most: int) -> list[float]:
        """Cost of forwards of 0 .. ``most`` rows in plain steps (forwards of one row); never falls with more rows."""
        seconds = self.reading(length, most).seconds
        return [taken / seconds[1] for taken in seconds[: most + 1]]

    def plain(self, length: int) -> float:
        """Seconds of a plain step, a forward of one row."""
        return self.reading(length, 1).seconds[1]

    def save(self, path: Path) -> None:
        """Write the curve as JSON; the file is replaced whole or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> CostCurve:
        """Read what ``save`` wrote.

        Raises:
            ConfigError: no such file, or no cost curve in it.
        """
        try:
            curve: CostCurve = read_json(cls, path.read_bytes())
            return curve
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is no cost curve ({shown(error, 300)}); make one with `specdec tune --out {path}`"
            ) from error


def roofline(*, at_once: bool = False) -> CostCurve:
    """An assumed curve for a device on which nothing was measured.

    A step reads the weights once, and each row adds arithmetic. An accelerator does both ``at_once``, so rows are free
    up to a limit; on a CPU the times add up. Its unit is the plain step, not the second. It depends on the kind of
    device only, not on the machine or the model.
    """
    if not at_once:
        return CostCurve(machine={}, rows=(1, 1 + _BALANCE), lengths=(1,), seconds=((1.0, 2.0),))
    most = _BALANCE_ACCELERATOR
    return CostCurve(machine={}, rows=(1, most, 2 * most), lengths=(1,), seconds=((1.0, 1.0, 2.0),))


def pass_price(weights: float, target: Target, costs: CostCurve, length: int) -> float:
    """Time of a drafter's pass of one row through ``weights`` parameters, in plain steps of the target."""
    plain = target.layer_weights + target.vocab_size * target.hidden_size
    return weights / plain + _PASS_SECONDS / costs.plain(length)
