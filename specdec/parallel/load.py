"""Load a model as one of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from specdec.errors import ConfigError
from specdec.models.live_model import load_live
from specdec.models.long_context import bound_context
from specdec.models.transformers_target import TransformersTarget
from specdec.parallel.ranks import join, local_device
from specdec.parallel.rows import ShardedTarget
from specdec.parallel.tensor import TensorTarget
from specdec.target import Target

__all__ = ["load_parallel"]


def load_parallel(
    kind: str,
    path: str | Path,
    *,
    max_rows: int,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
    max_model_len: int | None = None,
    **options: Any,
) -> Target:
    """As ``TransformersTarget.from_pretrained``, called by every process; ``kind`` is ``rows`` or ``tensor``.

    Raises:
        ConfigError: this process was started alone, or the model is to be spread in two ways at once; or weights that
            are split over processes are to be run by a named executor, or with rounded rows.
    """
    if device_map is not None:
        raise ConfigError(f"device_map is {device_map!r} and parallel {kind!r}; give only one of them")
    join(device)
    options["max_model_len"] = max_model_len
    if kind == "rows":
        own = TransformersTarget.from_pretrained(path, device=local_device(device), **options)
        return cast(Target, ShardedTarget(own, max_rows=max_rows))
    execution, attention = options.pop("execution", "auto"), options.pop("attention", "auto")
    if execution not in ("auto", "modules") or attention != "auto":
        asked = f"execution={execution!r}" if attention == "auto" else f"attention={attention!r}"
        raise ConfigError(f"parallel='tensor' splits the weights of a model's own modules; leave {asked} at auto")
    model, _ = load_live(path, device=None, device_map=None, split=True, **options)
    target = TransformersTarget(model)
    target.reason = "its weights are split over processes, as DTensors"
    bound_context(target, max_model_len)
    return cast(Target, TensorTarget(target))
