"""What the training configs of all drafters have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specdec.config import WeightsOptions
from specdec.errors import ConfigError
from training.acceptance import EvalConfig
from training.data import TextConfig
from training.loop import LoopConfig

__all__ = ["DTYPES", "LABELS", "TrainConfig"]

LABELS = ("soft", "hard")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(WeightsOptions):
    """Of any drafter's training; ``model`` and ``dtype`` are the frozen target's.

    Attributes:
        data: ``stdlib``, conversations (``.json``, ``.jsonl``) or text files.
        eval_data: the same for evaluation; empty holds out a share of ``data``.
        out: folder of checkpoint, log and result.
        start: folder of weights to go on from, such as those in this package, on data of one's own; what is trained is
            as they are then. None trains new ones.
        labels: ``soft``, the target's distribution, or ``hard``, one token; see the drafter's own.
        keep_features: GiB of the target's features that are held in memory, so that later epochs need no forward of it.
        save_dtype: of the weights' file, ``float32`` or ``bfloat16``; checkpoints keep float32.
        text, loop, evaluation: see their classes.

    Raises:
        ConfigError: no data, or labels of another kind.
    """

    data: list[str] = field(default_factory=list)
    eval_data: list[str] = field(default_factory=list)
    out: str = "runs/drafter"
    start: str | None = None
    labels: str = "soft"
    keep_features: float = 4.0
    save_dtype: str = "float32"
    text: TextConfig = field(default_factory=TextConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        WeightsOptions.__post_init__(self)
        if self.labels not in LABELS:
            raise ConfigError(f"labels is {self.labels!r}; it must be one of {', '.join(LABELS)}")
        if self.keep_features < 0:
            raise ConfigError(f"keep_features is {self.keep_features}; it is a size in GiB, 0 or more")
        if self.save_dtype not in DTYPES:
            raise ConfigError(f"save_dtype is {self.save_dtype!r}; it must be one of {', '.join(DTYPES)}")
        if not self.data:
            raise ConfigError("there is no data; give --data FILE (ShareGPT .json, .jsonl or text), or data: [stdlib]")
