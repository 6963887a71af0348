"""Programmatic dependent launch (CUDA, capability 9.0 and up): a kernel starts before the one before it has ended.

A kernel allows the next one to start, and waits for the end of the kernels before it prior to reading or writing memory
that they use. Work that depends on no kernel, such as reading weights into the cache, is done before the wait.

It is not used (:data:`EARLY`), as with it a step is not the same each time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["EARLY", "after_former", "early", "on_device"]

EARLY = 0
"""When a kernel allows the next one to start: 0 not before its end, 1 at its begin, 2 when those before it have ended.

With 1, on an H100 (Triton 3.6) in float16, about a third of the steps of a chain of 64 rows of SmolLM2's shape were not
those of other runs: rows 0 to 7 by the last bit of some numbers, behind the MLP of any layer. With 0 all were, as were
all in bfloat16. The reason is not known, and 2 has not run: ``scripts/gpu_check.py --only again`` asks a card."""


@triton.jit
def after_former(PDL: tl.constexpr):
    """Allow the next kernel to start, and wait until the kernels before this one have written their results.

    Before this call a kernel may read only memory that no kernel of a step writes: weights and the step's inputs.
    """
    if PDL == 1:
        gdc_launch_dependents()
    if PDL != 0:
        gdc_wait()
    if PDL == 2:
        gdc_launch_dependents()


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the one where a layer's tensors are."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@cache
def early(device: torch.device) -> dict[str, Any]:
    """Options of a launch, which may come before the kernel ahead has ended where EARLY is set and the device can."""
    if not EARLY or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": 0}
    return {"PDL": EARLY, "launch_pdl": True}
