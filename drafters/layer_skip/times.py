"""Times of a target's sublayers: measured once per machine and model, and kept beside its cost curve."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from specdec.costs.measuring import describe, stored_at, watched
from specdec.errors import SpecdecWarning, first_line
from specdec.settings.files import write_json
from specdec.settings.validation import read_json
from specdec.step import device_copies
from specdec.step.step_io import NOTHING, Entering, LayerPlan, Part, StepInput
from specdec.target import Target

__all__ = ["Times", "assumed", "measure", "times_of"]

_LENGTH = 128  # tokens of the text behind which a row is timed
_SECONDS, _REPEATS = 0.5, 9  # most seconds of all measurements behind the first of each, and most of each
_TICK = 1e-9  # least seconds, in case the clock did not advance


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of one row, in one unit.

    Attributes:
        layers: of all layers.
        head: of the last norm and the head.
        attention, mlp: of all layers' attention alone and of all layers' MLP alone.
    """

    layers: float
    head: float
    attention: float
    mlp: float

    @property
    def plain(self) -> float:
        """The time of a plain step."""
        return self.layers + self.head


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What a file holds: the conditions of a measurement, and its result in seconds."""

    machine: dict[str, Any]
    times: Times


def layer_weights(target: Target) -> tuple[list[float], list[float]]:
    """The number of weights of each layer's attention, and of the rest of it; equal numbers where they are unknown."""
    if target.sublayer_weights:
        attention, others = zip(*target.sublayer_weights, strict=True)
        return [*map(float, attention)], [*map(float, others)]
    each = target.layer_weights / target.num_layers
    return [each / 3] * target.num_layers, [each * 2 / 3] * target.num_layers


def assumed(target: Target) -> Times:
    """Times in proportion to weights, which bound a step with few rows; used where nothing was measured."""
    attention, others = layer_weights(target)
    head = float(target.vocab_size * target.hidden_size)
    return Times(layers=sum(attention) + sum(others), head=head, attention=sum(attention), mlp=sum(others))


def times_of(target: Target) -> Times:
    """The target's times: those that are kept, else measured now; kept if no other process took the processor."""
    machine = describe(target)
    path = stored_at({**machine, "sublayers": True})
    try:
        if path.exists():
            kept: _Kept = read_json(_Kept, path.read_bytes())
            if kept.machine == machine:
                return kept.times
    except (OSError, ValueError) as error:
        warnings.warn(f"cannot read {path}: {first_line(error)}; measuring anew", SpecdecWarning, stacklevel=2)
    times, steady = watched(partial(measure, target), target)
    try:
        if steady:
            write_json(path, asdict(_Kept(machine=machine, times=times)))
    except OSError as error:
        message = f"cannot keep the times of sublayers in {path}: {error}; they will be measured again"
        warnings.warn(message, SpecdecWarning, stacklevel=2)
    return times


def measure(target: Target, clock: Callable[[], float] = perf_counter) -> Times:
    """Time one row behind a text whose keys and values are zeros: the layers, their halves, and the head, in turn."""
    length = max(min(_LENGTH, target.context_length - 1), 0)
    layers = target.num_layers
    with target.active():
        cache = target.new_cache(capacity=length + 1, rows=1)
        cache.reserve(length + 1)
        for group in cache.groups:  # never written, they may hold numbers that are slow to compute with
            group.clear()
        cache.length = length
        hidden = target.embed([0])
        row = StepInput.of(cache, [0], wanted=NOTHING)
        works: dict[str, Callable[[], object]] = {
            "layers": lambda: target.forward(row),
            "head": lambda: target.head(target.norm(hidden)),
        }
        for name, part in (("attention", Part.ATTENTION), ("mlp", Part.MLP)):
            plan, entering = LayerPlan(parts=(part,) * layers), Entering(0, hidden)
            half = StepInput.of(cache, [0], plan=plan, wanted=NOTHING, entering=entering)
            works[name] = partial(target.forward, half)
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():  # the first of each does not count
            work()
        began = clock()
        for turn in range(_REPEATS):
            if turn and clock() - began > _SECONDS:
                break
            for name, work in works.items():
                seconds[name].append(max(device_copies.seconds_of(work, target.device, clock), _TICK))
    return Times(**{name: median(of) for name, of in seconds.items()})
