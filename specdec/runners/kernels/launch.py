"""How kernels of a step follow one another on a GPU: the next one is launched while the one before still runs.

Programmatic dependent launch (CUDA, capability 9.0 and up): a kernel may be on its processors before the one ahead of
it has ended. Every kernel waits for that end before it reads or writes what others read or write, and says at once
that the next may come. What depends on no kernel, reading weights into the cache, is done before the wait.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["after_former", "early", "on_device"]


@triton.jit
def after_former(PDL: tl.constexpr):
    """Let the next kernel be launched, and wait for those ahead, whose numbers are there then.

    Before it a kernel reads what no kernel of a step writes: weights, and what the step was sent.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one where a layer's tensors are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of a launch that may come before the kernel ahead has ended, where the device can do that."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
