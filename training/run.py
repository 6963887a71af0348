"""A training run, from its config to weights with a card beside them, whatever drafter is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from drafters.vocabulary import token_counts
from specdec.engine import Engine
from specdec.model import TransformersTarget
from specdec.text import load_tokenizer
from training.acceptance import Written, continued_texts
from training.card import CardText, identity, model_card, write_card
from training.config import TrainConfig
from training.data import load_samples
from training.device import frozen_target
from training.log import read_log
from training.loop import Trainable, new_accelerator, train
from training.packing import pack

__all__ = ["parameters_of", "run_training"]


def parameters_of(module: nn.Module) -> int:
    """How many numbers a module holds."""
    return sum(p.numel() for p in module.parameters())


class Trained(Trainable, Protocol):
    """A trainable that can tell of itself."""

    def card(self) -> CardText:
        """What its card says."""


def run_training(
    config: TrainConfig,
    option: str,
    make: Callable[[TransformersTarget, torch.Tensor], Any],
    trainable: Callable[[Any, TransformersTarget, Sequence[Written]], Trained],
) -> dict[str, float]:
    """Train as a config says; returns the best checkpoint's evaluation.

    Args:
        config: the run's.
        option: the drafter's option that takes the weights' folder, such as ``medusa.heads``.
        make: the module to train, for a target and [V] counts of the data's tokens; it has a dataclass ``config``.
        trainable: module, target and the texts that it is judged by, as the loop takes them.

    Raises:
        SpecdecError: whatever is wrong with config, data, model or disk; see the parts.
    """
    accelerator = new_accelerator(config.loop)
    say = accelerator.print
    target, why = frozen_target(config, accelerator.device)
    say(f"{why}; the drafter's in {'bfloat16' if accelerator.mixed_precision == 'bf16' else 'float32'}")
    tokenizer = load_tokenizer(config.model)
    learnt, held = load_samples(
        config.data, config.eval_data, config.text, tokenizer, say, vocab_size=target.vocab_size
    )
    module = make(target, token_counts((sample.tokens for sample in learnt), target.vocab_size))
    windows = pack(learnt, config.text.length)
    part = trainable(module, target, continued_texts(Engine(target), held, config.evaluation))
    text = part.card()
    say(
        f"{len(learnt)} samples, {len(held)} held out; {len(windows)} windows of {windows.length} tokens, "
        f"{windows.trained} trained; {text.about}"
    )
    drafter, _, weights = option.partition(".")
    out, what = Path(config.out), identity(config, {weights: asdict(module.config)})
    best = train(part, windows, config.loop, accelerator, out, run=what)
    if accelerator.is_main_process:
        write_card(out / "best", model_card(text, config, windows, read_log(out / "log.jsonl")))
        say(
            f"best at step {best['step']:.0f}, {best['tokens_per_step']:.3f} tokens per step; to use it: "
            f"--drafter {drafter} --set {option}={config.out}/best"
        )
    return best
