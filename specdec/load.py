"""Load: the engine that a command's options ask for."""

from __future__ import annotations

import torch
from rich.console import Console
from transformers.utils import logging

from specdec.config import RunConfig
from specdec.engine import Engine
from specdec.errors import ConfigError

__all__ = ["load"]


def load(run: RunConfig) -> Engine:
    """The engine of a run, without transformers' progress bars between our lines.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    threads = run.threads or (1 if run.model == "tiny" else None)
    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        torch.empty(0, device=run.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"device {run.device!r} cannot be used: {reason}; leave it out, or name one of here"
        ) from error
    with Console(stderr=True).status(f"Loading {run.model}") as status:
        return Engine.from_pretrained(
            run.model,
            run.drafter,
            dtype=run.dtype,
            device=run.device,
            device_map=run.device_map,
            attention=run.attention,
            optimize=run.optimize,
            compile=run.compile,
            policy=run.policy,
            progress=lambda share: status.update(f"Measuring what rows cost on this machine, {share:.0%}"),
        )
