"""Options of a Kangaroo training where none are given: by the size of the model, and by what is known of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from specdec.engine.config import merge, resolve
from specdec.errors import ConfigError
from specdec.settings.files import write_text, writing
from specdec.settings.options import Given
from specdec.settings.parsing import load_yaml
from specdec.target import Target

__all__ = ["OPTIONS", "Settle", "chosen", "keep_options", "kept_options", "settling"]

OPTIONS = "options.yaml"
"""File in a run's folder with all options of the run."""

Settle = Callable[[Target], tuple[Any, str]]
"""The options for a target, and a line about those that were chosen; empty where none were."""

_MEASURED: dict[tuple[int, int], dict[str, Any]] = {  # layers and hidden size -> as configs/train has them
    (16, 192): {
        "labels": "soft",
        "adapter": {"exit_layer": 4, "variant": "layer", "intermediate_size": 1024, "gamma": 4},
        "text": {"length": 256},
        "loop": {"steps": 600, "batch": 12, "optimizer": "muon", "lr": 7e-3, "decay": 0.75},
    },
    (30, 576): {
        "labels": "soft",
        "hard_share": 0.1,
        "adapter": {"exit_layer": 5, "variant": "layer", "draft_vocab": 8192},
        "loop": {"steps": 300, "batch": 4, "optimizer": "muon", "lr": 5e-3, "decay": 0.8},
    },
}
_PUBLISHED = {32: 2, 40: 3}  # layers -> exit layer; Vicuna 7B and 13B
_SMALL = 2048  # hidden size below which an adapter with an MLP pays
_HEAD = 4 * 8192  # tokens from which on a draft vocabulary pays


def chosen(target: Target) -> tuple[dict[str, Any], str]:
    """Options for a target, and by what they are."""
    layers, size = target.num_layers, target.hidden_size
    if (layers, size) in _MEASURED:
        return _MEASURED[layers, size], "measured on this model"
    if size >= _SMALL:
        exit_layer = _PUBLISHED.get(layers) or max(1, round(layers / 14))
        own = {"exit_layer": exit_layer, "variant": "attention"}
        loop = {"epochs": 2.0, "batch": 8, "optimizer": "adamw", "lr": 5e-5}
        why = f"published for {layers} layers" if layers in _PUBLISHED else "by analogy to models of 32 and 40 layers"
        return {"labels": "soft", "adapter": own, "loop": loop}, why
    vocab = 8192 if target.vocab_size >= _HEAD else 0
    own = {"exit_layer": max(1, round(layers / 6)), "variant": "layer", "draft_vocab": vocab}
    return {**_MEASURED[30, 576], "adapter": own}, "by analogy to SmolLM2 (30 layers of width 576)"


def settling(kind: type[Any], given: Given, where: str) -> Settle:
    """Completes the options that were given by those of a former run in the same folder, or by ``chosen``."""

    def settle(target: Target) -> tuple[Any, str]:
        out = Path(resolve(kind, given, where=where).out)
        former = kept_options(out)
        base, why = (former, "") if former else chosen(target)
        config = resolve(kind, replace(given, values=merge(base, given.values)), where=where)
        if why == "":
            return config, f"the options are those of {str(out / OPTIONS)!r}"
        own, loop = config.adapter, config.loop
        length = f"{loop.steps} steps" if loop.steps else f"{loop.epochs:g} epochs"
        return config, (
            f"without --config: exit layer {own.exit_layer} of {target.num_layers}, variant {own.variant}, "
            f"{own.draft_vocab or target.vocab_size} draft tokens, {loop.optimizer} at {loop.lr:g}, {length} of "
            f"{loop.batch} windows ({why}); --set changes each"
        )

    return settle


def kept_options(out: Path) -> dict[str, Any]:
    """The options of the run in a folder; empty where it has none.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return load_yaml(out / OPTIONS) if (out / OPTIONS).is_file() else {}
    except ConfigError as error:
        raise ConfigError(f"{error}; delete it to have them chosen anew, or give another --out") from error


def keep_options(config: Any, out: Path) -> None:
    """Write all options of a run into its folder.

    Raises:
        CheckpointError: the file could not be written.
    """
    with writing("the options", out / OPTIONS, "make room and start the same command again"):
        write_text(out / OPTIONS, yaml.safe_dump(asdict(config), sort_keys=False))
