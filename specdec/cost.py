"""Cost: the seconds that a forward of some rows takes after a text of some length, measured on the machine at hand.

On an accelerator 64 rows may cost what one does; on a CPU eight rows may cost two. What a drafter should propose is
decided by this curve, so it is measured once for a model, dtype, device and number of threads, and kept.
How it is followed from there on: :mod:`specdec.live`. Where nothing may be measured, :func:`roofline` stands in.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec import copies
from specdec.block import Block
from specdec.draft import Draft
from specdec.errors import ConfigError, SpecdecWarning, shown
from specdec.files import cache_folder, write_json
from specdec.machine import digest_of_code, processor
from specdec.native.library import digest_of_library
from specdec.target import Target
from specdec.values import read_json

__all__ = [
    "LENGTHS",
    "ROWS",
    "CostCurve",
    "Reading",
    "cost_curve",
    "describe",
    "kept_curve",
    "measure",
    "new_curve",
    "pass_price",
    "roofline",
    "source_of",
    "stored_at",
]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LENGTHS = (128, 512, 2048, 8192)
_QUICK_SECONDS, _QUICK_ROWS, _QUICK_LENGTHS = 1.0, (1, 2, 3, 4, 6, 8, 16, 32, 64), (256,)
_REPEATS = 15
_GROWTH = 32  # texts grow by so many tokens while forwards are timed, and begin anew: some kernels plan by length
_STEADY = 0.8  # share of a measurement's time in which its thread must have had a processor
_PASS_SECONDS = 6e-5  # of a drafter's pass, besides its weights
_READ, _READINGS = 256, 512  # rows of a reading, or more, and readings of a curve that are kept
_MOST = 10**9  # rows, tokens and seconds of a curve
_TICK = 1e-9  # seconds that anything takes, by a clock that did not move meanwhile
_FIRST_PASS = 0.5  # share of the time that every number of rows may take once, before any is timed again

# Rows whose arithmetic takes as long as reading the weights once. A CPU core does some ten operations on a float32
# weight while it reads one from memory, an accelerator some hundreds on a half precision one, and a row needs two.
_BALANCE, _BALANCE_ACCELERATOR = 10, 150


class Reading(NamedTuple):
    """A curve after texts of some length.

    Attributes:
        seconds: of forwards of 0, 1, 2, ... rows; where more rows take less, those of as many. So who wants rows takes
            all that come for the same.
        cheapest: of as many rows, what the cheapest one beyond them adds, in seconds.
    """

    seconds: list[float]
    cheapest: list[float]


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """T(rows) at several context lengths.

    Attributes:
        machine: what it holds for, see :func:`describe`.
        rows: ascending; the first is 1.
        lengths: tokens in the cache, ascending.
        seconds: per length, the median seconds of a forward of so many rows, all with logits.
        steady: whether the processor was its own while it was measured; only such a curve is kept.
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
        """Itself: nothing bends it, see :class:`specdec.live.LiveCosts`."""
        return self

    @cached_property
    def _readings(self) -> dict[tuple[int, int], Reading]:
        """By length and rows; sequences share them."""
        return {}

    def at(self, length: int, most: int) -> npt.NDArray[np.float64]:
        """Seconds of 0 .. ``most`` rows after ``length`` tokens; straight lines between and beyond the measured.

        Where no more rows were measured than a step is bound by reading the weights for, their slope says nothing of
        the arithmetic beyond; then it is at least that of the roofline.
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
        """What forwards of up to ``most`` rows, or more, take after ``length`` tokens."""
        size = max(_READ, 1 << most.bit_length())  # nearly all ask for as many, so that the curve is seldom read
        known = self._readings.get((length, size))
        if known is None:
            seconds = np.minimum.accumulate(self.at(length, size)[::-1])[::-1]
            cheapest = np.minimum.accumulate((seconds[1:] - seconds[:-1])[::-1])[::-1]
            if len(self._readings) == _READINGS:
                self._readings.clear()
            known = self._readings[length, size] = Reading(seconds.tolist(), [*cheapest.tolist(), math.inf])
        return known

    def steps(self, length: int, most: int) -> list[float]:
        """What 0 .. ``most`` rows cost in plain steps, forwards of one row; few never cost more than many."""
        seconds = self.reading(length, most).seconds
        return [taken / seconds[1] for taken in seconds[: most + 1]]

    def plain(self, length: int) -> float:
        """Seconds of a plain step."""
        return self.reading(length, 1).seconds[1]

    def paying(self, gains: Sequence[float], length: int) -> int:
        """How many rows below the root bring the most expected tokens for their time; ``gains``: each one's chance."""
        steps, tokens = self.steps(length, len(gains) + 1), [*accumulate(gains, initial=1.0)]
        return max(range(1, len(tokens)), key=lambda rows: tokens[rows] / steps[1 + rows], default=1)

    def tree_rows(self, length: int, most: int) -> int:
        """How many rows below the root, up to ``most``, are a good size for a tree of which nothing more is known.

        It is supposed that the k-th best row is right once in k + 1 times.
        """
        return self.paying([1 / (row + 1) for row in range(1, most + 1)], length)

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> CostCurve:
        """Read what ``save`` wrote.

        Raises:
            ConfigError: no such file, or no cost curve in it.
        """
        try:
            found: CostCurve = read_json(cls, path.read_bytes())
            return found
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is no cost curve ({shown(error, 300)}); make one with `specdec tune --out {path}`"
            ) from error


def roofline(device: torch.device | str) -> CostCurve:
    """What is supposed of a device where nothing was measured: a step reads the weights once, each row adds arithmetic.

    An accelerator does both at once, so rows are free up to its balance; on a CPU the times add up. Seconds are plain
    steps. It knows the kind of device only, neither the machine nor the model.
    """
    if torch.device(device).type == "cpu":
        return CostCurve(machine={}, rows=(1, 1 + _BALANCE), lengths=(1,), seconds=((1.0, 2.0),))
    most = _BALANCE_ACCELERATOR
    return CostCurve(machine={}, rows=(1, most, 2 * most), lengths=(1,), seconds=((1.0, 1.0, 2.0),))


def pass_price(weights: float, target: Target, costs: CostCurve, length: int) -> float:
    """Plain steps of the target that a drafter's pass takes which reads so many weights, one row of them."""
    plain = target.layer_weights + target.vocab_size * target.hidden_size
    return weights / plain + _PASS_SECONDS / costs.plain(length)


def describe(target: Target, **options: Any) -> dict[str, Any]:
    """What a measurement holds for: machine, code, the model's shape and how it is run; never its weights.

    ``options`` go before the target's own.
    """
    config, options = getattr(target, "config", None), {**getattr(target, "options", {}), **options}
    if options.get("runner") == "native":
        options["library"] = digest_of_library()
    inner = [value for name in ("intermediate_size", "num_key_value_heads") if (value := getattr(config, name, None))]
    return {
        "device": processor(target.device),
        "threads": torch.get_num_threads() if target.device.type == "cpu" else None,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "code": digest_of_code(),
        "model": getattr(target, "name", type(target).__name__),
        "shape": [target.num_layers, target.hidden_size, target.vocab_size, *inner],
        "dtype": str(target.dtype).removeprefix("torch."),
        **options,
    }


def stored_at(machine: Mapping[str, Any]) -> Path:
    """The file in which the curve for such a machine and model is kept."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "cost" / f"{digest[:16]}.json"


def cost_curve(
    target: Target, file: str | Path | None = None, *, progress: Callable[[float], None] | None = None
) -> CostCurve:
    """The target's curve: from ``file``, else as it was kept, else measured now, in about a second, and kept.

    ``progress`` is told of a measurement only, see :func:`measure`. A file that is broken, or was made for another
    machine or model, is passed over with a warning that says so.

    Raises:
        ConfigError: ``file`` does not exist.
    """
    agreed = getattr(target, "agreed_curve", None)
    if agreed is not None:  # several processes have to go by the same one
        return agreed(progress)  # type: ignore[no-any-return]
    machine = describe(target)
    path = stored_at(machine) if file is None else Path(file)
    if file is not None and not path.exists():
        raise ConfigError(f"there is no cost file {str(path)!r}; make it with `specdec tune --out {path}`")
    if (kept := kept_curve(machine, path)) is not None:
        return kept
    return new_curve(target, None if file is not None else path, progress)  # a user's own file is not overwritten


def new_curve(
    target: Target,
    path: Path | None = None,
    progress: Callable[[float], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> CostCurve:
    """The target's curve, measured in about a second; kept at ``path``, with a warning where that cannot be.

    Where others had this thread's processor meanwhile, it is not ``steady``, and not kept: it would hold for later.
    """
    began, worked = clock(), thread_time()
    curve = measure(
        target, rows=_QUICK_ROWS, lengths=_QUICK_LENGTHS, seconds=_QUICK_SECONDS, progress=progress, clock=clock
    )
    if target.device.type == "cpu" and clock is perf_counter:  # elsewhere the thread waits for others by intent
        curve = replace(curve, steady=thread_time() - worked >= _STEADY * (clock() - began))
    try:
        if path is not None and curve.steady:
            curve.save(path)
    except OSError as error:
        message = f"cannot keep the cost curve in {path}: {error}; it will be measured again"
        warnings.warn(message, SpecdecWarning, stacklevel=3)
    return curve


def kept_curve(machine: Mapping[str, Any], path: Path | None = None) -> CostCurve | None:
    """The curve that is kept for such a machine and model, at ``path`` or in its own place; None where there is none.

    One that is broken, or of another machine or model, is passed over with a warning.
    """
    path = path or stored_at(machine)
    try:
        curve = CostCurve.load(path) if path.exists() else None
    except ConfigError as error:
        warnings.warn(f"{error}; measuring anew", SpecdecWarning, stacklevel=3)
        return None
    if curve is None:
        return None
    other = [key for key, value in machine.items() if curve.machine.get(key) != value]
    if other:
        told = ", ".join(f"{key} {curve.machine.get(key)!r} and not {machine[key]!r}" for key in other)
        warnings.warn(f"the cost file {path} was made for {told}; measuring anew", SpecdecWarning, stacklevel=3)
        return None
    return curve


def source_of(curve: CostCurve, file: str | Path | None = None) -> str:
    """Where a curve was read or made, for people: ``file``, the place where curves are kept, or neither."""
    if not curve.machine:
        return "a roofline, as nothing was timed here"
    for path in (Path(file or ""), stored_at(curve.machine)):
        with suppress(ConfigError):  # a broken file is not where it came from, and was told of when it was passed over
            if path.is_file() and CostCurve.load(path) == curve:
                return str(path)
    return "a measurement that was not kept"


def measure(
    target: Target,
    *,
    rows: Sequence[int] = ROWS,
    lengths: Sequence[int] = LENGTHS,
    seconds: float = 60.0,
    progress: Callable[[float], None] | None = None,
    clock: Callable[[], float] = perf_counter,
    tree: bool | None = None,
) -> CostCurve:
    """Time forwards of random tokens after texts whose keys and values are zeros, each a token longer than before.

    The rows are a binary tree, or with ``tree=False`` a chain; None takes trees but on a CPU, where what differs is
    within the noise. On a CUDA device all that is compiled or recorded once is so before the first is timed.

    ``seconds`` bounds the whole but for one forward of each length: repeats are given up first, then the largest
    forwards, then the longest texts; what was not measured is extrapolated. ``progress`` gets the share that is done,
    0.0 first; ``clock`` tells seconds.
    """
    longest = max(target.context_length - rows[-1] - _GROWTH, 1)
    tree = copies.is_apart(target.device) if tree is None else tree
    lengths = sorted({min(length, longest) for length in lengths})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (rows[-1],), generator=generator).tolist()
    progress = progress or (lambda share: None)
    progress(0.0)
    found: list[list[float]] = []
    longer = cycle(range(_GROWTH))

    def take(length: int, count: int) -> float:
        cache.length = length + next(longer)
        if tree:
            draft = Draft(tokens[:count], [-1, *((row - 1) // 2 for row in range(1, count))])
            block = Block.of(draft, cache, target.device, target.backend)
        else:
            block = Block(cache, tokens[:count], device=target.device, backend=target.backend)
        return max(copies.seconds_of(lambda: target.forward(block), target.device, clock), _TICK)

    with target.active():
        cache = target.new_cache(capacity=lengths[-1] + _GROWTH, rows=rows[-1])
        cache.reserve(lengths[-1] + _GROWTH + rows[-1])
        for group in cache.groups:  # never written, they may hold numbers that are slow to compute with
            group.keys.zero_()
            group.values.zero_()
        for count in rows if copies.is_apart(target.device) else ():
            take(lengths[0], count)
        began = clock()
        for number, length in enumerate(lengths):
            until = began + seconds * (number + 1) / len(lengths)
            if found and clock() + 2 * sum(found[-1]) > until:
                break
            times = _times(partial(take, length), rows, until - clock(), clock)
            if found and len(times) < len(rows):
                break
            found.append(times)
            rows = list(rows[: len(times)])
            progress((number + 1) / len(lengths))
    return CostCurve(machine=describe(target), rows=rows, lengths=lengths[: len(found)], seconds=found)


def _times(
    take: Callable[[int], float], rows: Sequence[int], seconds: float, clock: Callable[[], float]
) -> list[float]:
    """Median seconds for each number of rows, for as many of ``rows`` as the time allows.

    The first forward of a number does not count. All numbers get as much of the time as the others, in turn, so that
    few rows, which decide most, are timed most often. And the median, as steps are paid for with what they usually
    take: where a neighbour shares the core, arithmetic may take twice as long every other moment, and a plain step,
    which waits for memory, does not; the least of some forwards would know nothing of it.
    """
    began = clock()
    warm = take(rows[0])
    if warm > seconds / 4:  # one forward is all that there is time for
        return [warm]
    times: list[list[float]] = []
    for count in rows:
        ahead = 4 * times[-1][0] if times else 0.0  # twice the rows take at most twice as long, twice
        if clock() + ahead > began + _FIRST_PASS * seconds:
            break
        take(count)
        times.append([take(count)])
    while open_ := [(sum(of), number) for number, of in enumerate(times) if len(of) < _REPEATS]:
        _, number = min(open_)
        if clock() + times[number][0] > began + seconds:
            break
        times[number].append(take(rows[number]))
    return [median(of) for of in times]
