"""Load: the engine that a command's options ask for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging

from specdec.engine.config import ModelOptions, RunConfig
from specdec.engine.engine import Engine
from specdec.models.loading import check_place
from specdec.parallel.ranks import join, silence

__all__ = ["load", "load_run", "model_arguments", "prepare"]

_ARGUMENTS = (
    *("revision", "subfolder", "max_model_len", "dtype", "device", "device_map", "execution", "attention"),
    "activations",
)


def load(
    options: ModelOptions,
    drafter: str | Mapping[str, Any] = "none",
    policy: str = "acceptance",
    parallel: str = "off",
) -> Engine:
    """The engine that options describe, after ``prepare``; of several processes, only rank 0 prints from then on."""
    prepare(options)
    if parallel != "off":
        join(options.device)
        silence()
    with Console(file=sys.stderr).status(f"Loading {options.model}") as status:

        def report(share: float) -> None:
            status.update(f"Timing steps of {options.model}, once for this machine ({share:.0%})")

        return Engine.from_pretrained(
            options.model,
            drafter,
            **model_arguments(options),
            tokenizer=options.tokenizer,
            parallel=parallel,
            policy=policy,
            progress=report,
        )


def load_run(run: RunConfig) -> Engine:
    """The engine of a run, with its drafter and policy."""
    return load(run, run.drafter, run.policy, run.parallel)


def model_arguments(options: ModelOptions) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that say how a model is loaded and run."""
    arguments = {name: getattr(options, name) for name in _ARGUMENTS}
    template = getattr(options, "chat_template", None)  # of the commands that talk
    return arguments if template is None else {**arguments, "chat_template": template}


def prepare(options: ModelOptions) -> None:
    """Set torch's threads, see that the device is there, and keep transformers' lines from between ours.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    threads = options.threads or (1 if options.model == "tiny" else None)
    if threads is not None:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    check_place(options.device, options.device_map)
