"""The identity of a training run: what must be equal when a run goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

__all__ = ["comparable", "identity", "judging", "sources"]

_TEXTS = ("data", "eval_data", "text")
_PLACES = ("model", *_TEXTS, "out", "features_folder")  # hashes identify these better
_MEMORY = ("keep_features",)  # a run that ran out of memory goes on with less
_JUDGING = ("evaluation", "tree", "judged_depth")  # the best checkpoint is judged anew where these differ
_INTERVALS = {"wandb": "off", "log_every": 1, "save_every": 1, "eval_every": 1}


def identity(config: Any, weights: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The values that must not change when a run continues.

    Args:
        config: the training config; of its options, those that say where things lie, how memory is used and how the
            weights are judged may change.
        weights: the weights' own config, with the target's fingerprint.
        precision: dtype of the computation, as accelerate calls it.
    """
    options = {name: value for name, value in asdict(config).items() if name not in _PLACES}
    return comparable({**options, **weights}, precision)


def sources(config: Any) -> dict[str, Any]:
    """The options of the texts and the model, which ``identity`` leaves to hashes; messages name them."""
    return {name: value for name, value in asdict(config).items() if name in ("model", *_TEXTS)}


def judging(config: Any) -> str:
    """The options by which the best checkpoint is chosen, as text."""
    return repr({name: value for name, value in asdict(config).items() if name in _JUDGING})


def comparable(run: Mapping[str, Any], precision: str | None = None) -> dict[str, Any]:
    """The values of a run that another one is compared by; those of runs of older versions become like newer ones."""
    kept = {name: value for name, value in run.items() if name not in (*_MEMORY, *_JUDGING)}
    for name, value in kept.items():
        if isinstance(value, Mapping):
            kept[name] = {part: own for part, own in value.items() if part != "depth"}  # that of the judged chains
    if isinstance(loop := kept.get("loop"), Mapping) and {"batch", "accumulate"} <= loop.keys():
        parts = {name: value for name, value in loop.items() if name not in ("batch", "accumulate")}
        each = loop["batch"] * loop["accumulate"]  # windows of a step; the parts follow from the memory
        kept["loop"] = {**parts, **_INTERVALS, "batch * accumulate": each}
        if loop.get("precision") == "auto" and precision is not None:
            kept["loop"]["precision"] = precision
    return kept
