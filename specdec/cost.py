"""Cost: the seconds that a forward of some rows takes after a text of some length, measured on the machine at hand.

On an accelerator 64 rows may cost what one does; on a CPU eight rows may cost two. What a drafter should propose is
decided by this curve, so it is measured once for a model, dtype, device and number of threads, and kept.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.block import Block
from specdec.errors import ConfigError, SpecdecWarning
from specdec.machine import cache_folder, processor, write_json
from specdec.target import Target

__all__ = ["LENGTHS", "ROWS", "CostCurve", "cost_curve", "describe", "measure", "stored_at"]

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
LENGTHS = (128, 512, 2048, 8192)
_QUICK_SECONDS = 4.0
_QUICK = (1, 2, 4, 8, 16, 32, 64)
_REPEATS, _LEAST_REPEATS = 15, 3
_LEAST_ROWS = 3  # numbers of rows; from one alone nothing follows for others


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """T(rows) at several context lengths.

    Attributes:
        machine: what it holds for, see :func:`describe`.
        rows: ascending; the first is 1.
        lengths: tokens in the cache, ascending.
        seconds: per length, the least seconds of a forward of so many rows, all with logits.
    """

    machine: Mapping[str, Any]
    rows: Sequence[int]
    lengths: Sequence[int]
    seconds: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        for name, grid in (("rows", self.rows), ("lengths", self.lengths)):
            if not grid or any(after <= before for before, after in pairwise(grid)):
                raise ConfigError(f"a cost curve's {name} are {list(grid)}; they must ascend")
        if self.rows[0] != 1:
            raise ConfigError(f"a cost curve's rows begin with {self.rows[0]}; they must begin with 1")
        shape = [len(row) for row in self.seconds]
        if shape != [len(self.rows)] * len(self.lengths) or not all(t > 0 for row in self.seconds for t in row):
            raise ConfigError(
                f"a cost curve needs {len(self.rows)} positive times for each of {len(self.lengths)} lengths, "
                f"got {shape}; measure it anew with `specdec tune`"
            )

    def at(self, length: int, most: int) -> list[float]:
        """Seconds of 0 .. ``most`` rows after ``length`` tokens; straight lines between and beyond the measured."""
        grid, lengths = np.asarray(self.seconds, dtype=np.float64), self.lengths
        if len(lengths) == 1:
            seconds = grid[0]
        else:
            right = min(max(int(np.searchsorted(lengths, length)), 1), len(lengths) - 1)
            share = (length - lengths[right - 1]) / (lengths[right] - lengths[right - 1])
            share = max(share, 0.0)  # below the shortest, the shortest: a line could end below nothing
            seconds = grid[right - 1] + share * (grid[right] - grid[right - 1])
        wanted = np.arange(most + 1)
        values = np.interp(wanted, self.rows, seconds)
        if most > self.rows[-1] and len(self.rows) > 1:
            slope = max(seconds[-1] - seconds[-2], 0.0) / (self.rows[-1] - self.rows[-2])
            beyond = wanted > self.rows[-1]
            values[beyond] = seconds[-1] + slope * (wanted[beyond] - self.rows[-1])
        values[0] = 0.0
        result: list[float] = values.tolist()
        return result

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
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                machine=dict(found["machine"]),
                rows=[int(row) for row in found["rows"]],
                lengths=[int(length) for length in found["lengths"]],
                seconds=[[float(t) for t in row] for row in found["seconds"]],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no cost curve ({error!r}); make one with `specdec tune --out {path}`"
            ) from error


def describe(target: Target) -> dict[str, Any]:
    """What a measurement holds for: machine, versions, the model's shape and how it is run; never its weights."""
    model = getattr(target, "model", None)
    weights = () if model is None else model.parameters()
    return {
        "device": processor(target.device),
        "threads": torch.get_num_threads() if target.device.type == "cpu" else None,
        "torch": torch.__version__,
        "model": getattr(target, "name", type(target).__name__),
        "parameters": sum(weight.numel() for weight in weights),
        "shape": [target.num_layers, target.hidden_size, target.vocab_size],
        "dtype": str(target.dtype).removeprefix("torch."),
        "native": getattr(target, "native", False),
        **getattr(target, "options", {}),
    }


def stored_at(machine: Mapping[str, Any]) -> Path:
    """The file in which the curve for such a machine and model is kept."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "cost" / f"{digest[:16]}.json"


def cost_curve(target: Target, file: str | Path | None = None) -> CostCurve:
    """The target's curve: from ``file``, else as it was kept, else measured now, in a few seconds, and kept.

    A file that is broken, or was made for another machine or model, is passed over with a warning that says so.

    Raises:
        ConfigError: ``file`` does not exist.
    """
    machine = describe(target)
    path = stored_at(machine) if file is None else Path(file)
    if file is not None and not path.exists():
        raise ConfigError(f"there is no cost file {str(path)!r}; make it with `specdec tune --out {path}`")
    if path.exists():
        try:
            curve = CostCurve.load(path)
        except ConfigError as error:
            warnings.warn(f"{error}; measuring anew", SpecdecWarning, stacklevel=2)
        else:
            other = [key for key, value in machine.items() if curve.machine.get(key) != value]
            if not other:
                return curve
            told = ", ".join(f"{key} {curve.machine.get(key)!r} and not {machine[key]!r}" for key in other)
            warnings.warn(f"the cost file {path} was made for {told}; measuring anew", SpecdecWarning, stacklevel=2)
    curve = measure(target, rows=_QUICK, lengths=LENGTHS[:3], seconds=_QUICK_SECONDS)
    if file is None:  # a user's own file is not overwritten
        try:
            curve.save(path)
        except OSError as error:
            warnings.warn(
                f"cannot keep the cost curve in {path}: {error}; it will be measured again",
                SpecdecWarning,
                stacklevel=2,
            )
    return curve


def measure(
    target: Target,
    *,
    rows: Sequence[int] = ROWS,
    lengths: Sequence[int] = LENGTHS,
    seconds: float = 60.0,
    progress: Callable[[float], None] | None = None,
) -> CostCurve:
    """Time forwards of chains of random tokens.

    ``seconds`` bounds the whole: repeats are given up first, then the longest texts, then the largest forwards; what
    was not measured is extrapolated. ``progress`` gets the share that is done.
    """
    longest = max(target.context_length - rows[-1] - 1, 1)
    lengths = sorted({min(length, longest) for length in lengths})
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (lengths[-1] + rows[-1],), generator=generator).tolist()
    found: list[list[float]] = []
    done: list[int] = []
    with target.active():
        cache = target.new_cache(capacity=lengths[-1] + rows[-1], rows=max(512, rows[-1]))
        for number, length in enumerate(lengths):
            allowed = began + seconds * (number + 1) / len(lengths)
            if found:  # the text up to there, by the dearest forward so far, and as many forwards as a length must have
                ahead = (length - cache.length) / done[-1] * found[-1][-1] + _LEAST_REPEATS * sum(found[-1])
                if time.perf_counter() + ahead > allowed:
                    break
            _extend(target, cache, tokens[:length])
            found.append(_times(target, cache, tokens, done or rows, until=allowed))
            done = list(rows[: len(found[-1])])
            if progress is not None:
                progress((number + 1) / len(lengths))
    # A later length may have been left with fewer rows; what all have is kept.
    return CostCurve(
        machine=describe(target),
        rows=done,
        lengths=lengths[: len(found)],
        seconds=[row[: len(done)] for row in found],
    )


def _extend(target: Target, cache: Any, tokens: Sequence[int]) -> None:
    """Let the cache hold exactly ``tokens``, of which it holds the first ones."""
    while cache.length < len(tokens):
        chunk = tokens[cache.length : cache.length + 512]
        target.forward(Block(cache, chunk, device=target.device, backend=target.backend), rows=())
        cache.commit(range(len(chunk)))


def _times(target: Target, cache: Any, tokens: Sequence[int], rows: Sequence[int], *, until: float) -> list[float]:
    """Least seconds for each number of rows, taken in turn, for as many of ``rows`` as the time allows.

    The second of two forwards counts: in decoding, too, the one before has left the weights in the caches. And the
    least, as a busy machine only ever adds, and adds more to what is short.
    """
    taken: list[list[float]] = [[] for _ in rows]
    for repeat in range(-1, _REPEATS):
        for number, count in enumerate(rows):
            if repeat < 0 and number >= _LEAST_ROWS and time.perf_counter() > until:
                rows, taken = rows[:number], taken[:number]
                break
            if repeat >= _LEAST_REPEATS and time.perf_counter() > until:
                break
            began = 0.0
            for _ in range(2):
                block = Block(cache, tokens[:count], device=target.device, backend=target.backend)
                _wait(target.device)
                began = time.perf_counter()
                target.forward(block)
                _wait(target.device)
            if repeat >= 0:  # the first of all warms up
                taken[number].append(time.perf_counter() - began)
    return [min(times) for times in taken]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
