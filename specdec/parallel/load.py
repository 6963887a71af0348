"""Load a model as one of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specdec.errors import ConfigError
from specdec.models.loading import load_model
from specdec.models.long_context import bound_context
from specdec.parallel.ranks import join, local_device
from specdec.parallel.rows import ShardedTarget
from specdec.parallel.target import ParallelTarget
from specdec.parallel.tensor import TensorTarget

__all__ = ["load_parallel"]


def load_parallel(
    kind: str,
    path: str | Path,
    *,
    max_rows: int,
    dtype: str | torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
    trust_remote_code: bool,
    activations: str = "default",
    max_model_len: int | None = None,
    **options: Any,
) -> ParallelTarget:
    """As ``TransformersTarget.from_pretrained``, called by every process; ``kind`` is ``rows`` or ``tensor``.

    Raises:
        ConfigError: this process was started alone, or the model is to be spread in two ways at once; or rows are to be
            rounded, which native layers of one process do.
    """
    if device_map is not None:
        raise ConfigError(f"device_map is {device_map!r} and parallel {kind!r}; give only one of them")
    join(device)
    split = kind == "tensor"
    model = load_model(
        path,
        dtype=dtype,
        device=None if split else local_device(device),
        device_map=None,
        trust_remote_code=trust_remote_code,
        split=split,
        activations=activations,
        max_model_len=max_model_len,
    )
    options["owned"] = True
    target = TensorTarget(model, **options) if split else ShardedTarget(model, max_rows=max_rows, **options)
    bound_context(target, max_model_len)
    return target
