"""The training loop for all drafters: batches by number, exact resume, and the best checkpoint by its measured use.

A batch depends on the seed and the step only, and nothing else is random; a checkpoint has weights, optimizer and step.
So on a CPU, a run that is killed and started again ends with the same weights as one that ran through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from specdec.errors import NumericalError, pip_line
from training.checkpoint import load_checkpoint, save_checkpoint, state_of
from training.interrupt import Stop
from training.judging import Trainable, evaluated, judged_anew
from training.log import TrainingLog
from training.loop_config import LoopConfig, fast_dtype, half_is_fast, new_accelerator
from training.muon import Muon
from training.packing import Batch, Windows

__all__ = ["LoopConfig", "Trainable", "expected_seconds", "half_is_fast", "new_accelerator", "rows_of", "train"]


def train(
    trainable: Trainable,
    windows: Windows,
    config: LoopConfig,
    accelerator: Accelerator,
    folder: Path,
    *,
    run: Mapping[str, Any],
    judging: str = "",
    stop: Stop | None = None,
    dry_run: bool = False,
) -> dict[str, float]:
    """Train to the end, from the last checkpoint in ``folder``, if there is one.

    The run writes ``checkpoint.safetensors``, ``log.jsonl``, ``loss.png``, ``best/`` and ``last/`` there.

    Args:
        run: JSON values that identify this run; another run's checkpoint is refused.
        judging: what ``evaluate`` does, in words; where a checkpoint's best was judged otherwise, it is judged anew.
        stop: asks for the end after a step; None is never asked.
        dry_run: only tell how long the run is expected to take.

    Returns:
        The evaluation of the best checkpoint, and its ``step``.

    Raises:
        KeyboardInterrupt, SystemExit: ``stop`` asked for the end, and the checkpoint is written.
        NumericalError: the loss or the gradient is NaN or infinite; the message names the batch, and its step is not
            taken.
        CheckpointError: a checkpoint cannot be read or written.
    """
    steps = config.steps or math.ceil(
        config.epochs * len(windows) / (config.batch * config.accumulate * accelerator.num_processes)
    )
    run = {**run, "data": windows.digest, "steps": steps, "processes": accelerator.num_processes}
    path, stop = folder / "checkpoint.safetensors", stop or Stop()
    former = state_of(path).get("products")
    products = former if former in ("float32", "bfloat16") else fast_dtype(accelerator.device)
    optimizers = _optimizers(trainable.module, config, getattr(torch, products))
    state: dict[str, Any] = {"step": 0, "best": None, "seconds": 0.0}
    trainable.module.to(accelerator.device)
    if path.exists():
        state = load_checkpoint(path, trainable.module, optimizers, run=run)
        stop.kept = f"the checkpoint after step {state['step']} is in {str(folder)!r}"
    main = accelerator.is_main_process
    if state["best"] and not (folder / "best").is_dir():  # it was deleted, so the next one is the best
        state["best"] = None
    if main and not dry_run and state["best"] and state.get("judging") != judging and trainable.judges:
        state["best"] = judged_anew(trainable, folder / "best", state["best"])
    _tell_hours(trainable, windows, config, accelerator, state["step"], steps)
    if dry_run:
        return {}
    training = _Training(trainable, windows, config, accelerator, optimizers)
    log = TrainingLog(folder, state["step"], wandb=config.wandb, config=dict(run)) if main else None
    bar = tqdm(total=steps, initial=state["step"], unit="step", disable=not main, mininterval=1.0)
    began, tokens = perf_counter() - state["seconds"], 0.0
    start, stop.stepping = perf_counter(), True
    for step in range(state["step"], steps):
        rate = config.lr * rate_at(step, steps, config)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        figures = training.step(step)
        done, last = step + 1, step + 1 == steps
        state = {"step": done, "best": state["best"], "seconds": perf_counter() - began, "judging": judging}
        state |= {"precision": accelerator.mixed_precision, "products": products}
        bar.update()
        tokens += figures["tokens"]
        speed = tokens / max(perf_counter() - start, 1e-9)
        bar.set_postfix({"loss": f"{figures['loss']:.3f}", "tokens/s": f"{speed:.0f}"}, refresh=False)
        if log is not None and (last or done % config.log_every == 0):
            log.write(step=done, lr=rate, **figures, seconds=round(state["seconds"], 2))
        if last or done % config.eval_every == 0:
            if log is not None:
                state["best"] = training.evaluate(folder, done, state["best"], log, bar, last)
            accelerator.wait_for_everyone()
        ends = training.asked(stop) and not last
        if main and (last or ends or done % config.save_every == 0):
            save_checkpoint(path, trainable.module, optimizers, state=state, run=run)
            stop.kept = f"the checkpoint after step {done} of {steps} is in {str(folder)!r}"
        if ends:
            bar.close()
            accelerator.wait_for_everyone()
            raise stop.end()
    stop.stepping = False
    bar.close()
    if log is not None:
        if state["best"] is None:
            state["best"] = training.evaluate(folder, steps, None, log, bar, True)
            save_checkpoint(path, trainable.module, optimizers, state=state, run=run)
        trainable.save(folder / "last")
        if not log.close():
            accelerator.print(f"loss.png needs matplotlib: {pip_line('train')}, then start the same command again")
    return dict(state["best"] or {})


def _tell_hours(
    trainable: Trainable, windows: Windows, config: LoopConfig, accelerator: Accelerator, step: int, steps: int
) -> None:
    """Print how long the steps behind ``step`` are expected to take."""
    if step >= steps:
        accelerator.print(f"all {steps:,} steps are done")
        return
    seconds = expected_seconds(trainable, windows, config, accelerator, steps - step)
    evaluations = -(-steps // config.eval_every) - step // config.eval_every
    seconds += evaluations * trainable.evaluation_seconds(perf_counter)
    accelerator.print(f"{steps - step:,} steps are expected to take {seconds / 3600:.2f} hours here, with evaluation")


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
    """The expected seconds of all steps without evaluation, from a few forwards, backwards and updates of a copy.

    Each batch is timed twice: a shorter second time shows that features are kept, and so computed once per window.
    """
    each, count = config.batch, len(windows)
    firsts = [np.arange(place * each, (place + 1) * each) % count for place in range(2)]
    times = []
    for rows in (firsts[0], firsts[1], firsts[1]):  # the first one is a warm-up
        began = clock()
        with accelerator.autocast():
            loss = _loss(trainable, trainable.module, windows.at(rows).to(accelerator.device))
        loss.backward()
        loss.item()  # waits for the device
        times.append(clock() - began)
    update = _update_seconds(trainable.module, config, clock)
    for parameter in trainable.module.parameters():
        parameter.grad = None
    _, once, again = times
    forwards = steps * config.accumulate
    fresh = min(forwards, math.ceil(count / (each * accelerator.num_processes)))
    return steps * update + forwards * again + fresh * max(once - again, 0.0)


def _update_seconds(module: nn.Module, config: LoopConfig, clock: Callable[[], float]) -> float:
    """The seconds of an update by the optimizers, of copies of the parameters with their gradients."""
    copies = nn.ParameterList()
    for parameter in module.parameters():
        if parameter.grad is not None:
            copies.append(nn.Parameter(parameter.detach().clone()))
            copies[-1].grad = parameter.grad
    times = []
    for optimizer in 2 * _optimizers(copies, config):  # the first update makes the state
        began = clock()
        optimizer.step()
        if copies and copies[0].device.type == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - began)
    return sum(times[len(times) // 2 :])


def rate_at(step: int, steps: int, config: LoopConfig) -> float:
    """The factor of the learning rate at a step: rising linearly, constant, and falling to zero after the last step."""
    warm = max(config.warmup * steps, 1e-9)
    cool = max(config.decay * steps, 1e-9)
    return min(1.0, (step + 1) / warm, (steps - step) / cool)


def _optimizers(
    module: nn.Module, config: LoopConfig, products: torch.dtype | None = None
) -> list[torch.optim.Optimizer]:
    """The optimizers of a module's parameters; ``products`` is the dtype of Muon's, None that which is fast here."""
    learnt = [p for p in module.parameters() if p.requires_grad]
    matrices, rest = [p for p in learnt if p.ndim >= 2], [p for p in learnt if p.ndim < 2]
    made: list[torch.optim.Optimizer] = []
    if matrices and config.optimizer == "muon":
        dtype = products or getattr(torch, fast_dtype(matrices[0].device))
        made.append(Muon(matrices, config.lr, dtype=dtype))
        learnt = rest
    if learnt:
        made.append(torch.optim.AdamW(learnt, lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0))
    return made


def _loss(trainable: Trainable, module: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a batch, with a gradient of zero where the batch has nothing to learn from."""
    loss = trainable.loss(module, batch)
    return loss if loss.requires_grad else loss + 0 * sum(p.sum() for p in module.parameters() if p.requires_grad)


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
                loss = _loss(self._trainable, self._module, batch) / count
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

    def asked(self, stop: Stop) -> bool:
        """Whether the end was asked for in some process; all get the same answer."""
        if self._accelerator.num_processes == 1:
            return stop.signal != 0
        asked = torch.tensor(float(stop.signal != 0), device=self._accelerator.device)
        return float(self._accelerator.reduce(asked, "sum")) > 0

    def evaluate(
        self, folder: Path, step: int, best: dict[str, float] | None, log: TrainingLog, bar: Any, last: bool
    ) -> dict[str, float] | None:
        """Evaluate, and save the module if it is the best so far; returns the best evaluation so far."""
        trainable = self._trainable
        if not trainable.judges:
            if last:
                trainable.save(folder / "best")
            return {"step": step} if last else None
        figures = evaluated(trainable)
        log.write(step=step, **figures)
        bar.write(f"step {step}: " + ", ".join(f"{key} {value:.4g}" for key, value in figures.items()))
        if best is None or figures[trainable.metric] > best[trainable.metric]:
            trainable.save(folder / "best")
            return {"step": step, **figures}
        return best
