"""Measuring a cost curve once per model, dtype, device and number of threads, and keeping it in a file."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any, TypeVar

import torch

from specdec.costs.curve import CostCurve
from specdec.costs.machine import digest_of_code, processor
from specdec.errors import ConfigError, SpecdecWarning
from specdec.native.library import digest_of_library
from specdec.settings.files import cache_folder
from specdec.step import device_copies
from specdec.step.step_io import StepInput
from specdec.step.tree import Draft
from specdec.target import Target

__all__ = [
    "LENGTHS",
    "ROWS",
    "cost_curve",
    "describe",
    "kept_curve",
    "measure",
    "new_curve",
    "source_of",
    "stored_at",
    "watched",
]

T = TypeVar("T")

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LENGTHS = (128, 512, 2048, 8192)
_QUICK_SECONDS, _QUICK_ROWS, _QUICK_LENGTHS = 1.0, (1, 2, 3, 4, 6, 8, 16, 32, 64), (256,)
_REPEATS = 15
_GROWTH = 32  # tokens by which a timed text grows before it starts again, as some kernels plan anew for each length
_STEADY = 0.8  # share of a measurement's time in which its thread must have had a processor
_TICK = 1e-9  # least seconds of a forward, in case the clock did not advance
_FIRST_PASS = 0.5  # share of the time in which every number of rows is timed once, before any is timed again


def describe(target: Target, **options: Any) -> dict[str, Any]:
    """The conditions of a measurement: machine, code, the model's shape and how it is run, but not its weights.

    ``options`` override the target's.
    """
    config, options = target.config, {**target.options, **options}
    if options.get("runner") == "native":
        options["library"] = digest_of_library()
    inner = [value for name in ("intermediate_size", "num_key_value_heads") if (value := getattr(config, name, None))]
    return {
        "device": processor(target.device),
        "threads": None if target.launches else torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "code": digest_of_code(),
        "model": target.name,
        "shape": [target.num_layers, target.hidden_size, target.vocab_size, *inner],
        "dtype": str(target.dtype).removeprefix("torch."),
        **options,
    }


def stored_at(machine: Mapping[str, Any]) -> Path:
    """The file in which the curve of such a machine and model is kept."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "cost" / f"{digest[:16]}.json"


def cost_curve(
    target: Target, file: str | Path | None = None, *, progress: Callable[[float], None] | None = None
) -> CostCurve:
    """The target's curve: from ``file``, else the kept one, else measured now, in about a second, and kept.

    ``progress`` is called during a measurement only, see :func:`measure`. A file that is broken or was made for
    another machine or model is ignored with a warning.

    Raises:
        ConfigError: ``file`` does not exist.
    """
    if target.agreed_curve is not None:  # several processes must use the same curve
        return target.agreed_curve(progress)  # type: ignore[no-any-return]
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
    """The target's curve, measured in about a second and kept at ``path``; a failure to keep it is a warning.

    Where other processes took this thread's processor meanwhile, the curve is not ``steady`` and is not kept.
    """
    work = partial(
        measure,
        target,
        rows=_QUICK_ROWS,
        lengths=_QUICK_LENGTHS,
        seconds=_QUICK_SECONDS,
        progress=progress,
        clock=clock,
    )
    curve, steady = watched(work, target, clock)
    curve = replace(curve, steady=steady)
    try:
        if path is not None and curve.steady:
            curve.save(path)
    except OSError as error:
        message = f"cannot keep the cost curve in {path}: {error}; it will be measured again"
        warnings.warn(message, SpecdecWarning, stacklevel=3)
    return curve


def watched(measuring: Callable[[], T], target: Target, clock: Callable[[], float] = perf_counter) -> tuple[T, bool]:
    """The result of a measurement, and whether this thread had a processor to itself meanwhile."""
    began, worked = clock(), thread_time()
    found = measuring()
    waits = target.launches or clock is not perf_counter  # on a device the thread waits on purpose
    return found, waits or thread_time() - worked >= _STEADY * (clock() - began)


def kept_curve(machine: Mapping[str, Any], path: Path | None = None) -> CostCurve | None:
    """The curve that is kept for such a machine and model at ``path``, by default at ``stored_at``; None if none is.

    A file that is broken or belongs to another machine or model is ignored with a warning.
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
        difference = ", ".join(f"{key} {curve.machine.get(key)!r} and not {machine[key]!r}" for key in other)
        warnings.warn(f"the cost file {path} was made for {difference}; measuring anew", SpecdecWarning, stacklevel=3)
        return None
    return curve


def source_of(curve: CostCurve, file: str | Path | None = None) -> str:
    """Where a curve came from, as text for users: ``file``, the file in the cache folder, or neither."""
    if not curve.machine:
        return "a roofline, as nothing was timed here"
    for path in (Path(file or ""), stored_at(curve.machine)):
        with suppress(ConfigError):  # a broken file is not its source, and was warned about when it was ignored
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
    """Time forwards of random tokens after texts whose keys and values are zeros, each one token longer than the last.

    The rows are a binary tree, or with ``tree=False`` a chain; None takes chains on a CPU, where the difference is
    within the noise, and trees elsewhere. On a CUDA device everything that is compiled or recorded once is done before
    the first forward is timed.

    ``seconds`` bounds the whole but for one forward per length: repeats are dropped first, then the largest forwards,
    then the longest texts; what was not measured is extrapolated. ``progress`` gets the share that is done, first 0.0;
    ``clock`` returns seconds.
    """
    longest = max(target.context_length - rows[-1] - _GROWTH, 1)
    tree = target.launches if tree is None else tree
    lengths = sorted({min(length, longest) for length in lengths})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (rows[-1],), generator=generator).tolist()
    progress = progress or (lambda share: None)
    progress(0.0)
    grid: list[list[float]] = []
    longer = cycle(range(_GROWTH))

    def take(length: int, count: int) -> float:
        cache.length = length + next(longer)
        if tree:
            draft = Draft(tokens[:count], [-1, *((row - 1) // 2 for row in range(1, count))])
            step = StepInput.of(cache, draft.tokens, draft.tree)
        else:
            step = StepInput.of(cache, tokens[:count])
        return max(device_copies.seconds_of(lambda: target.forward(step), target.device, clock), _TICK)

    with target.active():
        cache = target.new_cache(capacity=lengths[-1] + _GROWTH, rows=rows[-1])
        cache.reserve(lengths[-1] + _GROWTH + rows[-1])
        for group in cache.groups:  # never written, they may hold numbers that are slow to compute with
            group.clear()
        for count in rows if target.launches else ():
            take(lengths[0], count)
        began = clock()
        for number, length in enumerate(lengths):
            until = began + seconds * (number + 1) / len(lengths)
            if grid and clock() + 2 * sum(grid[-1]) > until:
                break
            times = _times(partial(take, length), rows, until - clock(), clock)
            if grid and len(times) < len(rows):
                break
            grid.append(times)
            rows = list(rows[: len(times)])
            progress((number + 1) / len(lengths))
    return CostCurve(machine=describe(target), rows=rows, lengths=lengths[: len(grid)], seconds=grid)


def _times(
    take: Callable[[int], float], rows: Sequence[int], seconds: float, clock: Callable[[], float]
) -> list[float]:
    """Median seconds for each number of rows, for as many of ``rows`` as the time allows.

    The first forward of each number does not count. Each number gets an equal share of the time, so small numbers,
    which matter most, are timed most often. The median stands for the usual time. The minimum would not: where another
    process shares the core, arithmetic may take twice as long every other moment, and a plain step, which waits for
    memory, does not.
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
