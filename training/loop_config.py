"""The options of the training loop, and the precision that a device is fast in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Annotated, Literal

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from annotated_types import Ge, Gt, Le, Lt

from specdec.settings.validation import AtLeast1, check_fields

__all__ = ["LoopConfig", "fast_dtype", "half_is_fast", "new_accelerator"]

Count = Annotated[int, Ge(1), Le(65_536), "an integer from 1 to 65536"]  # windows of a forward, forwards of a step
Share = Annotated[float, Ge(0), Le(1), "a number in [0, 1]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The options of the loop.

    Attributes:
        epochs: passes over the data, where ``steps`` is 0.
        steps: optimizer steps; 0 computes them from ``epochs``.
        batch: windows in a forward of one process.
        accumulate: forwards in an optimizer step.
        optimizer: ``adamw``; or ``muon`` for matrices, scaled to AdamW's learning rates, with AdamW for all else. Its
            products are in bfloat16 where the device is fast in it, and in float32 elsewhere.
        lr: peak learning rate.
        warmup: share of the steps in which the learning rate rises linearly.
        decay: share of the steps in which it falls linearly to zero.
        clip: bound of the gradient's norm; 0 for none.
        precision: dtype of the computation, ``no`` for float32 or ``bf16``; ``auto`` takes ``bf16`` where the device is
            fast in it. Weights stay in float32.
        seed: seed of the windows' order and of the initial weights.
        eval_every, save_every, log_every: intervals in steps; the last step always does all three.
        wandb: ``off``, ``offline`` (used where installed) or ``online``.
    """

    epochs: Annotated[float, Gt(0), Lt(math.inf), "a finite number > 0"] = 1.0
    steps: Annotated[int, Ge(0), "an integer >= 0, where 0 follows from epochs"] = 0
    batch: Count = 8
    accumulate: Count = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Gt(0), Lt(math.inf), "a finite number > 0"] = 1e-3
    warmup: Share = 0.03
    decay: Share = 0.97
    clip: Annotated[float, Ge(0), "a number >= 0, where 0 is off"] = 1.0
    precision: Literal["auto", "no", "bf16"] = "auto"
    seed: Annotated[int, Ge(0), Lt(2**63), "an integer in [0, 2^63)"] = 0
    eval_every: AtLeast1 = 200
    save_every: AtLeast1 = 100
    log_every: AtLeast1 = 10
    wandb: Literal["off", "offline", "online"] = "offline"

    def __post_init__(self) -> None:
        check_fields(self, "loop.")


@cache
def half_is_fast(device: torch.device) -> bool:
    """Whether bfloat16 products are as fast as float32 products on the device; a CPU's are timed once.

    A checkpoint's dtype does not tell: a CPU without bfloat16 instructions takes ten times as long for them.
    """
    if device.type != "cpu":
        return device.type != "cuda" or torch.cuda.is_bf16_supported()
    return _seconds(torch.bfloat16) <= _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The least time of several products, in seconds, after one that is not counted."""
    matrix = torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(4):
        began = perf_counter()
        matrix @ matrix
        times.append(perf_counter() - began)
    return min(times[1:])


def fast_dtype(device: torch.device) -> str:
    """The dtype of Muon's products on a device."""
    return "bfloat16" if half_is_fast(device) else "float32"


def new_accelerator(config: LoopConfig) -> Accelerator:
    """The accelerator for the devices: one CPU or GPU, or as many as ``accelerate launch`` has started."""
    if config.precision != "auto":
        return Accelerator(mixed_precision=config.precision)
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # the first state is shared by all later ones
    return Accelerator(mixed_precision="bf16" if half_is_fast(state.device) else "no")
