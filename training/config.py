"""What the training configs of all drafters have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from specdec.config import WeightsOptions
from specdec.errors import ConfigError
from specdec.values import check_fields
from training.acceptance import EvalConfig
from training.data import TextConfig
from training.loop import LoopConfig

__all__ = ["DTYPES", "TrainConfig"]

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
    labels: Literal["soft", "hard"] = "soft"
    keep_features: Annotated[float, Ge(0), "a size in GiB, 0 or more"] = 4.0
    save_dtype: Literal["float32", "bfloat16"] = "float32"
    text: TextConfig = field(default_factory=TextConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        WeightsOptions.__post_init__(self)
        check_fields(self)
        if not self.data:
            raise ConfigError("there is no data; give --data FILE (ShareGPT .json, .jsonl or text), or data: [stdlib]")
