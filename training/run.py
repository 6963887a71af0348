"""A training run, from its config to weights with a card beside them, whatever drafter is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from specdec.engine import Engine
from specdec.model import TransformersTarget
from specdec.text import load_tokenizer
from training.acceptance import Written, greedy_texts
from training.card import identity, write_card
from training.config import TrainConfig
from training.data import load_samples
from training.log import read_log
from training.loop import Trainable, new_accelerator, train
from training.packing import Windows, pack

__all__ = ["parameters_of", "run_training"]


def parameters_of(module: nn.Module) -> int:
    """How many numbers a module holds."""
    return sum(p.numel() for p in module.parameters())


def run_training(
    config: TrainConfig,
    drafter: str,
    part: str,
    *,
    make: Callable[[TransformersTarget], Any],
    trainable: Callable[[Any, TransformersTarget, Sequence[Written]], Trainable],
    about: Callable[[Any], str],
    card: Callable[[Any, Any, Windows, Sequence[Mapping[str, Any]]], str],
) -> dict[str, float]:
    """Train as a config says; returns the best checkpoint's evaluation.

    Args:
        config: the run's.
        drafter, part: what the weights are for: the drafter's name, and its option that takes their folder.
        make: the module to train, for a target; it has a dataclass ``config``.
        trainable: module, target and the texts that it is judged by, as the loop takes them.
        about: the module in a few words.
        card: config, module, windows and the log's lines as Markdown.

    Raises:
        SpecdecError: whatever is wrong with config, data, model or disk; see the parts.
    """
    accelerator = new_accelerator(config.loop)
    say = accelerator.print
    target = TransformersTarget.from_pretrained(
        config.model, dtype=config.dtype, device=accelerator.device, execution="transformers"
    )
    tokenizer = load_tokenizer(config.model)
    module = make(target)
    learnt, held = load_samples(
        config.data, config.eval_data, config.text, tokenizer, say, vocab_size=target.vocab_size
    )
    windows = pack(learnt, config.text.length)
    say(
        f"{len(learnt)} samples, {len(held)} held out; {len(windows)} windows of {windows.length} tokens, "
        f"{windows.trained} trained; {about(module)}"
    )
    judged = config.evaluation
    texts = greedy_texts(Engine(target), held, count=judged.prompts, prompt=judged.prompt, new=judged.new)
    out, what = Path(config.out), identity(config, {part: asdict(module.config)})
    best = train(trainable(module, target, texts), windows, config.loop, accelerator, out, run=what)
    if accelerator.is_main_process:
        write_card(out / "best", card(config, module, windows, read_log(out / "log.jsonl")))
        say(
            f"best at step {best['step']:.0f}, {best['tokens_per_step']:.3f} tokens per step; to use it: "
            f"--drafter {drafter} --set {drafter}.{part}={config.out}/best"
        )
    return best
