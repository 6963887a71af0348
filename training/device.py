"""What a device computes fast, and so in which precision a drafter and its frozen target run.

A checkpoint in bfloat16 says nothing of the machine: a CPU without instructions for it takes ten times as long as in
float32. Native layers are as fast in either, as they widen weights while they read them.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

from specdec.config import WeightsOptions
from specdec.model import TransformersTarget

__all__ = ["frozen_target", "half_is_fast"]

_SIZE, _TRIES = 512, 3


@cache
def half_is_fast(device: torch.device) -> bool:
    """Whether a product in bfloat16 takes the device no longer than one in float32; on a CPU both are timed once."""
    if device.type != "cpu":
        return device.type != "cuda" or torch.cuda.is_bf16_supported()
    return _seconds(torch.bfloat16) <= _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """The least of a few products' times, the first left out."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    times = []
    for _ in range(1 + _TRIES):
        began = perf_counter()
        matrix @ matrix
        times.append(perf_counter() - began)
    return min(times[1:])


def frozen_target(options: WeightsOptions, device: torch.device) -> tuple[TransformersTarget, str]:
    """The target to train for, in a dtype that the device is fast in where ``auto`` leaves it open; a line about it.

    Raises:
        SpecdecError: no model there, or one that specdec cannot drive.
    """
    target = TransformersTarget.from_pretrained(options.model, dtype=options.dtype, device=device)
    reason = ""
    slow = target.dtype is torch.bfloat16 and target.runner.name != "native" and not half_is_fast(device)
    if options.dtype == "auto" and slow:
        target = TransformersTarget.from_pretrained(options.model, dtype=torch.float32, device=device)
        reason = ", as bfloat16 is slow here"
    dtype = str(target.dtype).removeprefix("torch.")
    return target, f"the target runs in {dtype} on {target.device}, {target.runner.name} layers{reason}"
