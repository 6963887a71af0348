"""The training loop for all drafters: batches by number, exact resume, and the best checkpoint by its measured use.

A batch depends on the seed and the step only, and nothing else is random; a checkpoint has weights, optimizer and step.
So on a CPU, a run that is killed and started again ends with the same weights as one that ran through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env
from annotated_types import Ge, Gt, Le, Lt
from torch import nn
from tqdm import tqdm

from specdec.errors import NumericalError, pip_line
from specdec.settings.validation import AtLeast1, check_fields
from training.checkpoint import load_checkpoint, save_checkpoint
from training.log import TrainingLog
from training.packing import Batch, Windows

__all__ = ["LoopConfig", "Trainable", "expected_seconds", "half_is_fast", "new_accelerator", "rows_of", "train"]

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
        optimizer: ``adamw``; or ``muon`` for matrices, scaled to AdamW's learning rates, with AdamW for all else.
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


class Trainable(Protocol):
    """The interface of a drafter's training; the loop does the rest.

    Attributes:
        module: the module whose parameters with gradients are trained.
        metric: name of the figure of ``evaluate`` that chooses the best checkpoint, the largest value.
    """

    module: nn.Module
    metric: str

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss *summed* over ``batch.targets``; ``module`` is the trained module, perhaps wrapped by accelerate."""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, by name."""

    def save(self, folder: Path) -> None:
        """Write the module's weights for use."""


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


def new_accelerator(config: LoopConfig) -> Accelerator:
    """The accelerator for the devices: one CPU or GPU, or as many as ``accelerate launch`` has started."""
    if config.precision != "auto":
        return Accelerator(mixed_precision=config.precision)
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))  # the first state is shared by all later ones
    return Accelerator(mixed_precision="bf16" if half_is_fast(state.device) else "no")


def train(
    trainable: Trainable,
    windows: Windows,
    config: LoopConfig,
    accelerator: Accelerator,
    folder: Path,
    *,
    run: Mapping[str, Any],
) -> dict[str, float]:
    """Train to the end, from the last checkpoint in ``folder``, if there is one.

    The run writes ``checkpoint.safetensors``, ``log.jsonl``, ``loss.png``, ``best/`` and ``last/`` there.

    Args:
        run: JSON values that identify this run; another run's checkpoint is refused.

    Returns:
        The evaluation of the best checkpoint, and its ``step``.

    Raises:
        NumericalError: the loss or the gradient is NaN or infinite; the message names the batch, and its step is not
            taken.
        CheckpointError: a checkpoint cannot be read or written.
    """
    steps = config.steps or math.ceil(
        config.epochs * len(windows) / (config.batch * config.accumulate * accelerator.num_processes)
    )
    run = {**run, "data": windows.digest, "steps": steps, "processes": accelerator.num_processes}
    path = folder / "checkpoint.safetensors"
    optimizers = _optimizers(trainable.module, config)
    state: dict[str, Any] = {"step": 0, "best": None, "seconds": 0.0}
    trainable.module.to(accelerator.device)
    if path.exists():
        state = load_checkpoint(path, trainable.module, optimizers, run=run)
    main = accelerator.is_main_process
    if (left := steps - state["step"]) > 0:
        hours = expected_seconds(trainable, windows, config, accelerator, left) / 3600
        accelerator.print(f"{left:,} steps are expected to take {hours:.2f} hours here, besides evaluation")
    training = _Training(trainable, windows, config, accelerator, optimizers)
    log = TrainingLog(folder, state["step"], wandb=config.wandb, config=dict(run)) if main else None
    bar = tqdm(total=steps, initial=state["step"], unit="step", disable=not main, mininterval=1.0)
    began, tokens = perf_counter() - state["seconds"], 0.0
    start = perf_counter()
    for step in range(state["step"], steps):
        rate = config.lr * rate_at(step, steps, config)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        figures = training.step(step)
        done = step + 1
        last = done == steps
        state = {"step": done, "best": state["best"], "seconds": perf_counter() - began}
        state["precision"] = accelerator.mixed_precision
        bar.update()
        tokens += figures["tokens"]
        speed = tokens / max(perf_counter() - start, 1e-9)
        bar.set_postfix({"loss": f"{figures['loss']:.3f}", "tokens/s": f"{speed:.0f}"}, refresh=False)
        if log is not None and (last or done % config.log_every == 0):
            log.write(step=done, lr=rate, **figures, seconds=round(state["seconds"], 2))
        if last or done % config.eval_every == 0:
            if log is not None:
                state["best"] = training.evaluate(folder, done, state["best"], log, bar)
            accelerator.wait_for_everyone()
        if main and (last or done % config.save_every == 0):
            save_checkpoint(path, trainable.module, optimizers, state=state, run=run)
    bar.close()
    if log is not None:
        trainable.save(folder / "last")
        if not log.close():
            accelerator.print(f"loss.png needs matplotlib: {pip_line('train')}, then start the same command again")
    return dict(state["best"] or {})


def rows_of(step: int, config: LoopConfig, windows: int, rank: int, processes: int) -> list[npt.NDArray[np.int64]]:
    """The window numbers of each forward in a step, for one process.

    Epoch e takes the windows in an order drawn from (seed, e); a step at the end of an epoch takes the rest from the
    next epoch.

    Example: 5 windows, batch 2, accumulate 1, one process: steps take 0 1 | 2 3 | 4 0' | 1' 2' | ... of the orders.
    """
    each = config.batch * config.accumulate
    places = np.arange(step * each * processes + rank, (step + 1) * each * processes, processes)
    rows = np.empty(each, dtype=np.int64)
    for epoch in np.unique(places // windows):
        in_epoch = places // windows == epoch
        order = np.random.default_rng((config.seed, int(epoch))).permutation(windows)
        rows[in_epoch] = order[places[in_epoch] % windows]
    return np.split(rows, config.accumulate)


def expected_seconds(
    trainable: Trainable,
    windows: Windows,
    config: LoopConfig,
    accelerator: Accelerator,
    steps: int,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """The expected seconds of all steps without evaluation, from a few forwards and backwards that change nothing.

    Each batch is timed twice: a shorter second time shows that features are kept, and so computed once per window.
    """
    each, count = config.batch, len(windows)
    firsts = [np.arange(place * each, (place + 1) * each) % count for place in range(2)]
    times = []
    for rows in (firsts[0], firsts[1], firsts[1]):  # the first one is a warm-up
        began = clock()
        with accelerator.autocast():
            loss = trainable.loss(trainable.module, windows.at(rows).to(accelerator.device))
        loss.backward()
        loss.item()  # waits for the device
        times.append(clock() - began)
    for parameter in trainable.module.parameters():
        parameter.grad = None
    _, once, again = times
    forwards = steps * config.accumulate
    fresh = min(forwards, math.ceil(count / (each * accelerator.num_processes)))
    return forwards * again + fresh * max(once - again, 0.0)


def rate_at(step: int, steps: int, config: LoopConfig) -> float:
    """The factor of the learning rate at a step: rising linearly, constant, and falling to zero after the last step."""
    warm = max(config.warmup * steps, 1e-9)
    cool = max(config.decay * steps, 1e-9)
    return min(1.0, (step + 1) / warm, (steps - step) / cool)


def _optimizers(module: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    learnt = [p for p in module.parameters() if p.requires_grad]
    matrices, rest = [p for p in learnt if p.ndim >= 2], [p for p in learnt if p.ndim < 2]
    made: list[torch.optim.Optimizer] = []
    if matrices and config.optimizer == "muon":
        made.append(torch.optim.Muon(matrices, lr=config.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        learnt = rest
    if learnt:
        made.append(torch.optim.AdamW(learnt, lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0))
    return made


class _Training:
    """A trainable and its optimizers, prepared by accelerate."""

    def __init__(
        self,
        trainable: Trainable,
        windows: Windows,
        config: LoopConfig,
        accelerator: Accelerator,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._trainable, self._windows, self._config, self._accelerator = trainable, windows, config, accelerator
        self._module, *self._optimizers = accelerator.prepare(trainable.module, *optimizers)

    def step(self, step: int) -> dict[str, float]:
        """Do an optimizer step; the loss is the mean over all trained tokens of its forwards on all processes."""
        accelerator, config = self._accelerator, self._config
        rows = rows_of(step, config, len(self._windows), accelerator.process_index, accelerator.num_processes)
        batches = [self._windows.at(part, step).to(accelerator.device) for part in rows]
        counts = torch.tensor(float(sum(len(b.targets) for b in batches)), device=accelerator.device)
        count = max(float(accelerator.reduce(counts, "sum")), 1.0)
        total = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(batches):
            waits = number < len(batches) - 1  # only the last forward exchanges gradients between processes
            with accelerator.no_sync(self._module) if waits else nullcontext(), accelerator.autocast():
                loss = self._trainable.loss(self._module, batch) / count
                # Processes average their gradients, but the loss is a sum over all of them.
                accelerator.backward(loss * accelerator.num_processes)
            total += loss.detach()
        value = float(accelerator.reduce(total, "sum"))
        norm = float(accelerator.clip_grad_norm_(self._trainable.module.parameters(), config.clip or math.inf))
        finite = math.isfinite(value) and math.isfinite(norm)
        for optimizer in self._optimizers:
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not finite:
            raise NumericalError(
                f"step {step + 1}: loss is {value}, gradient norm {norm}, on windows {np.concatenate(rows).tolist()}; "
                "the weights are as before this step. Look at these windows, lower loop.lr, or set loop.precision=no"
            )
        return {"loss": value, "grad_norm": norm, "tokens": count}

    def evaluate(
        self, folder: Path, step: int, best: dict[str, float] | None, log: TrainingLog, bar: Any
    ) -> dict[str, float]:
        """Evaluate, and save the module if it is the best so far; returns the best evaluation so far."""
        trainable = self._trainable
        trainable.module.eval()
        figures = trainable.evaluate()
        trainable.module.train()
        log.write(step=step, **figures)
        bar.write(f"step {step}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
        if best is None or figures[trainable.metric] > best[trainable.metric]:
            trainable.save(folder / "best")
            return {"step": step, **figures}
        return best
