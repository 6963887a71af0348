"""How products are cut on this card: chosen at a warm-up by the time of whole recorded steps, and kept in files.

All cuts that are offered sum the same numbers in the same order (:mod:`specdec.runners.kernels.product`), which is
compared on the device before one is timed. So a clock decides how long a step takes and never what it computes. A
choice belongs to a weight's shape and a bucket of rows, as what fits into a program differs between buckets.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from types import ModuleType
from typing import Any

import torch

from specdec.errors import SpecdecWarning, first_line
from specdec.settings.files import cache_folder, digest_of, parse_json, write_json
from specdec.step.device_copies import seconds_of

__all__ = ["BUDGET", "ChosenCuts", "Weight", "any_rows", "card_of", "fastest", "weight_of"]

Weight = tuple[int, int, bool]
"""Outputs and inputs of a product, and whether its weight is of two, gate and up."""
Replay = Callable[[], None]

BUDGET = 10.0
"""Seconds that a warm-up may choose for: with what it compiles and records besides, 20 for a 7 B model."""

_LATER = 2.0  # seconds in a warm-up that finds choices kept, for what the budget of the first one did not suffice for
_ROUNDS = 9  # in each of which every cut's step is timed once


class ChosenCuts:
    """The cuts of one model's products on one device; what was not chosen is as the kernels' own table has it.

    Args:
        kernels: with ``product``, ``offered`` and ``shared_of``.
        dtype: of the weights.

    Attributes:
        card: what the choices hold for; None on a device for which nothing is chosen.
    """

    def __init__(self, kernels: ModuleType, device: torch.device, dtype: torch.dtype) -> None:
        self._kernels, self._device, self._dtype = kernels, device, str(dtype).removeprefix("torch.")
        self._chosen: dict[Weight, dict[int, Any]] = {}
        self.card = card_of(device)

    def of(self, weight: Weight) -> Mapping[int, Any]:
        """Bucket of rows -> cut; a weight's kept choices are read when it is first asked for."""
        if weight not in self._chosen:
            self._chosen[weight] = {} if self.card is None else self._kept(weight)
        return self._chosen[weight]

    def buckets(self) -> tuple[int, ...]:
        """Those of rows, ascending."""
        found: tuple[int, ...] = self._kernels.buckets_of(self._shared)
        return found

    def choose(
        self, buckets: Sequence[int], recording: Callable[[int], Any], same: Callable[[Weight, int, Any], bool]
    ) -> bool:
        """Choose for all weights that were asked for, bucket by bucket; returns whether any step changes.

        Args:
            buckets: one after the other; where the time ends, later ones keep the table's cuts.
            recording: bucket -> context, inside which a call records a whole step as products are cut then.
            same: whether a cut gives a weight's product the same bits as the table's.
        """
        began, changed, longest = perf_counter(), False, 0.0
        until = began + (_LATER if any(self._chosen.values()) else BUDGET)
        for bucket in buckets:
            left = [weight for weight, known in [*self._chosen.items()] if bucket not in known]
            if not left or perf_counter() + longest > until:
                continue
            with recording(bucket) as record:
                try:
                    step = record()
                except Exception:  # steps are launched kernel by kernel, which whoever records the first one tells
                    return changed
                for weight in left:
                    began = perf_counter()
                    if began + longest > until:
                        break
                    step, cut = self._fastest_step(weight, bucket, step, record, same)
                    changed |= cut != self._kernels.offered(*weight, bucket, self._shared)[0]
                    self._chosen[weight][bucket] = cut
                    longest = max(longest, perf_counter() - began)
            for weight in left:
                self._keep(weight)
        return changed

    @property
    def _shared(self) -> int:
        shared: int = self._kernels.shared_of(self._device)
        return shared

    def _fastest_step(
        self, weight: Weight, bucket: int, step: Replay, record: Callable[[], Replay], same: Callable[..., bool]
    ) -> tuple[Replay, Any]:
        """The step with the cut of one weight that makes it fastest, and the cut; ``step`` has the table's."""
        usual, *others = self._kernels.offered(*weight, bucket, self._shared)
        steps, known = [(step, usual)], self._chosen[weight]
        for cut in others:
            try:
                if not same(weight, bucket, cut):
                    continue
                known[bucket] = cut
                steps.append((record(), cut))
            except Exception:  # what does not compile here, or cannot be recorded, is not chosen
                continue
            finally:
                known.pop(bucket, None)
        for replay, _ in steps:
            replay()
        times: list[list[float]] = [[] for _ in steps]
        for _ in range(_ROUNDS):  # in turn, as a card's clock rises and falls
            for own, (replay, _) in zip(times, steps, strict=True):
                own.append(seconds_of(replay, self._device, perf_counter))
        return steps[fastest(times)]

    # -- Files ---------------------------------------------------------------------------------------------------------

    def _conditions(self, weight: Weight) -> dict[str, Any]:
        outputs, inputs, gated = weight
        return {**(self.card or {}), "dtype": self._dtype, "outputs": outputs, "inputs": inputs, "gated": gated}

    def _file(self, weight: Weight) -> Path:
        digest = hashlib.sha256(json.dumps(self._conditions(weight), sort_keys=True).encode()).hexdigest()
        return cache_folder() / "cuts" / f"{digest[:16]}.json"

    def _keep(self, weight: Weight) -> None:
        path = self._file(weight)
        cuts = {str(bucket): asdict(cut) for bucket, cut in self._chosen[weight].items()}
        try:
            write_json(path, {"for": self._conditions(weight), "cuts": cuts})
        except OSError as error:
            message = f"cannot keep how products are cut in {path}: {error}; the next warm-up chooses again"
            warnings.warn(message, SpecdecWarning, stacklevel=5)

    def _kept(self, weight: Weight) -> dict[int, Any]:
        """The choices in a weight's file; with a warning that has the reason, none of a file that is another's."""
        path = self._file(weight)
        try:
            if not path.exists():
                return {}
            return self._read(weight, parse_json(path.read_bytes()))
        except (OSError, ValueError) as error:
            message = f"{path} does not tell how products are cut: {first_line(error)}; the next warm-up chooses again"
            warnings.warn(message, SpecdecWarning, stacklevel=4)
            return {}

    def _read(self, weight: Weight, value: Any) -> dict[int, Any]:
        """The choices of a file's value; ValueError where it has anything but cuts that are offered."""
        conditions = self._conditions(weight)
        if not isinstance(value, dict) or value.get("for") != conditions:
            raise ValueError(f"it is not for {json.dumps(conditions)}")
        if not isinstance(cuts := value.get("cuts"), dict):
            raise ValueError("it has no cuts")
        found = {}
        for bucket in self.buckets():
            if (given := cuts.pop(str(bucket), None)) is not None:
                offered = self._kernels.offered(*weight, bucket, self._shared)
                found[bucket] = next((cut for cut in offered if _equal(asdict(cut), given)), None)
                if found[bucket] is None:
                    raise ValueError(f"its cut for {bucket} rows is none of those that give the same numbers")
        if cuts:
            raise ValueError(f"there is no bucket of {next(iter(cuts))!r} rows")
        return found

    def describe(self) -> str | None:
        """What is chosen, and what is as the table has it; None where nothing can be."""
        if self.card is None:
            return None
        told, timed = [], 0
        for weight, cuts in self._chosen.items():
            for bucket, cut in sorted(cuts.items()):
                usual = self._kernels.offered(*weight, bucket, self._shared)[0]
                timed += 1
                if cut != usual:
                    differs = [
                        f"{value} {name}" for name, value in asdict(cut).items() if value != getattr(usual, name)
                    ]
                    told.append(f"{weight[0]} x {weight[1]} up to {bucket} rows: {', '.join(differs)}")
        if not timed:
            return "the table's; a warm-up on a GPU times others by whole steps"
        return "; ".join([*told, f"the table's for the other {timed - len(told)} of {timed} that were timed"])


def weight_of(weight: torch.Tensor, *, gated: bool = False) -> Weight:
    """The shape of a product with a weight [out, in], or [2 out, in] of gate and up."""
    outputs, inputs = weight.shape
    return outputs // (2 if gated else 1), inputs, gated


def any_rows(count: int, like: torch.Tensor) -> torch.Tensor:
    """Rows [count, in] for a weight [out, in], of numbers of many sizes; torch's own generators give none of them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, like.shape[1], generator=generator)
    sizes = torch.randint(-6, 3, rows.shape, generator=generator)
    return torch.ldexp(rows, sizes).to(like)


def card_of(device: torch.device) -> dict[str, Any] | None:
    """What decides how long a cut takes, besides the weight: the card, the compiler and the kernel; None elsewhere."""
    if device.type != "cuda":
        return None
    known = torch.cuda.get_device_properties(device)
    return {
        "card": torch.cuda.get_device_name(device),
        "capability": [known.major, known.minor],
        "processors": known.multi_processor_count,
        "torch": str(torch.__version__),
        "triton": str(import_module("triton").__version__),
        "kernel": digest_of(Path(__file__).parent / "kernels" / "product.py")[:16],
    }


def fastest(times: Sequence[Sequence[float]]) -> int:
    """Which of several steps is taken: the fastest, or the first unless that wins by more than both spread together.

    ``times``: seconds of each step. The spread is from the second lowest to the second highest.
    """
    middle = [median(each) for each in times]
    best = min(range(len(times)), key=middle.__getitem__)
    return best if middle[0] - middle[best] > _spread(times[0]) + _spread(times[best]) else 0


def _spread(times: Sequence[float]) -> float:
    ordered = sorted(times)
    return ordered[-2] - ordered[1]


def _equal(cut: Mapping[str, int], given: Any) -> bool:
    """Whether a file gives a cut: the same names and numbers, all of them integers (to Python, 1.0 and True are 1)."""
    return bool(cut == given) and all(type(value) is int for value in given.values())
