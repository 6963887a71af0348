"""Which executor runs a decoder: by name, or the fastest exact one, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.errors import ConfigError
from specdec.execute import cuda_kernels
from specdec.execute.cuda import CudaExecutor
from specdec.execute.native import NativeExecutor
from specdec.execute.native_layers import why_not
from specdec.execute.torch import TorchExecutor

__all__ = ["Chosen", "executor_of"]


class Chosen(NamedTuple):
    """An executor, why it was taken, and why the others were not, by their names."""

    executor: TorchExecutor
    reason: str
    others: Mapping[str, str]


def executor_of(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    execution: str = "auto",
    attention: str = "auto",
    int8: bool = False,
) -> Chosen:
    """Make the executor that ``execution`` asks for: ``auto``, ``native`` or ``fused``.

    The latter is torch's operations, or on a CUDA device Triton's kernels, where they compute the decoder.

    Raises:
        ConfigError: the named one cannot run it.
    """
    why = why_not(checkpoint.spec, dtype, device)
    if attention != "auto":
        why = f"attention={attention!r} asks for torch's kernels, and native layers have one of their own"
    if execution == "native" and why is not None:
        raise ConfigError(f"execution={execution!r} cannot run this model: {why}; leave it at auto")
    if execution == "native" or (execution == "auto" and why is None):
        native = NativeExecutor(checkpoint, dtype=dtype, int8=int8)
        return Chosen(native, "it was asked for" if execution == "native" else "all layers run in one call", {})
    by_torch = cuda_kernels.why_not(checkpoint.spec, dtype, device)
    own: dict[str, Any] = {"dtype": dtype, "device": device, "backend": attention}
    fused = CudaExecutor(checkpoint, **own) if by_torch is None else TorchExecutor(checkpoint, **own, int8=int8)
    others = {"CUDA kernels": by_torch} if by_torch is not None and device.type == "cuda" else {}
    if execution == "fused" or why is None:
        return Chosen(fused, "it was asked for", others)
    return Chosen(fused, why, {"native": why, **others})
