"""The log of a training run: a JSON line for each step, a plot of the loss, and wandb where it is installed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, pip_line
from specdec.settings.files import append_lines, read_lines, replacing, write_text, writing
from specdec.settings.validation import read_json

__all__ = ["TrainingLog", "draw_curves", "plot", "read_log"]


class TrainingLog:
    """Writes ``log.jsonl``; lines behind ``step``, from a run that was killed, are dropped.

    Args:
        folder: folder of ``log.jsonl`` and ``loss.png``.
        step: number of steps that are done.
        wandb: ``off``, ``offline`` (used if installed) or ``online``.
        config: the config to show in wandb.

    Raises:
        ConfigError: wandb is required but not installed.
    """

    def __init__(self, folder: Path, step: int, *, wandb: str = "off", config: Any = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self._run = _wandb_run(wandb, folder, config)
        kept = [line for line in read_log(self.path) if line["step"] <= step]
        with self._disk():
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def _disk(self) -> AbstractContextManager[None]:
        return writing("the log", self.path, "the last checkpoint is whole. Make room and start the same command again")

    def write(self, **values: Any) -> None:
        """Write a line; ``step`` must be among the values.

        Raises:
            CheckpointError: the file cannot be written, for example because the disk is full.
        """
        with self._disk():
            append_lines(self.path, values)
        if self._run is not None:
            self._run.log({k: v for k, v in values.items() if k != "step"}, step=values["step"])

    def close(self) -> bool:
        """Draw the plot and end the wandb run; returns False where matplotlib is missing."""
        with self._disk():
            drawn = plot(read_log(self.path), self.path.with_name("loss.png"))
        if self._run is not None:
            self._run.finish()
        return drawn


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; an incomplete last line, from a kill, is left out.

    Raises:
        ConfigError: a line is not a log's.
    """

    def read(number: int, text: bytes) -> dict[str, Any]:
        line: dict[str, Any] = read_json(dict[str, int | float], text)
        if type(line.get("step")) is not int:
            raise ValueError("it has no step")
        return line

    return read_lines(path, read, "line of a log", "delete it, and start the same command again")


def plot(lines: list[dict[str, Any]], path: Path) -> bool:
    """Draw loss and evaluation over steps; returns False where matplotlib is not installed."""
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    scores = [(line["step"], line["tokens_per_step"]) for line in lines if "tokens_per_step" in line]
    labels = ("step", "training loss, nats per token", "held-out tokens per step")
    return draw_curves(path, losses, scores, labels=labels)


def draw_curves(
    path: Path,
    left: Sequence[tuple[float, float]],
    right: Sequence[tuple[float, float]],
    *,
    labels: tuple[str, str, str],
) -> bool:
    """Draw two curves of points (x, y) over one axis; returns False where matplotlib is not installed.

    Args:
        path: the picture's path; the suffix decides its format.
        left, right: the points; the right axis is left out where it has none.
        labels: labels of the axes: below, left, right.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*(zip(*left, strict=True) if left else ((), ())), color="tab:blue")
    axes.set(xlabel=labels[0], ylabel=labels[1])
    if right:
        other = axes.twinx()
        other.plot(*zip(*right, strict=True), color="tab:orange", marker="o", markersize=3)
        other.set_ylabel(labels[2])
    with replacing(path) as new:
        figure.savefig(new, dpi=120)
    return True


def _wandb_run(mode: str, folder: Path, config: Any) -> Any:
    if mode == "off":
        return None
    try:
        import wandb
    except ImportError as error:
        if mode == "online":
            raise ConfigError(f"wandb=online needs wandb: {pip_line('wandb')}") from error
        return None
    return wandb.init(project="specdec", dir=str(folder), mode=mode, config=config, resume="allow", id=folder.name)
