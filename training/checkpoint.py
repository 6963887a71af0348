"""Checkpoints of a training run, and the check that a run continues its own checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from specdec.errors import CheckpointError, ConfigError
from specdec.settings.files import check_same_run, parse_json, replacing
from training.identity import comparable

__all__ = ["load_checkpoint", "precision_of", "save_checkpoint", "state_of"]

_NEW = ("drafter", "held_out", "sources")  # what runs of older versions do not tell


def save_checkpoint(
    path: Path,
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    state: Mapping[str, Any],
    run: Mapping[str, Any],
) -> None:
    """Write weights, optimizers and ``state``; a kill or a full disk at any time leaves the earlier file whole.

    Args:
        state: JSON values that ``load_checkpoint`` returns.
        run: the run's identity; only a run with an equal one can resume.

    Raises:
        CheckpointError: the file could not be written.
    """
    tensors = {f"module.{name}": tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                tensors[f"optimizer.{number}.{index}.{key}"] = torch.as_tensor(value).detach().cpu().contiguous()
    try:
        with replacing(path) as new:
            save_file(tensors, new, metadata={"state": json.dumps(dict(state)), "run": json.dumps(dict(run))})
    except (OSError, SafetensorError) as error:
        former = "the former one is whole" if path.exists() else "there was none before"
        raise CheckpointError(
            f"cannot write the checkpoint {str(path)!r}: {error}; {former}. Make room and start the same command again"
        ) from error


def load_checkpoint(
    path: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, run: Mapping[str, Any]
) -> dict[str, Any]:
    """Load weights and optimizers; returns the state.

    Raises:
        CheckpointError: the file is not a checkpoint of this module.
        ConfigError: the checkpoint is another run's; the message names the option that differs.
    """
    weights: dict[str, torch.Tensor] = {}
    moments: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            former, state = parse_json(metadata["run"]), parse_json(metadata["state"])
            if not isinstance(former, dict) or not isinstance(state, dict) or type(state.get("step")) is not int:
                raise ValueError("it does not say what run it is of, and how far that had come")
            _check(path, comparable(former, state.get("precision")), json.loads(json.dumps(dict(run))))
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                kind, _, rest = name.partition(".")
                if kind == "module":
                    weights[rest] = file.get_tensor(name)
                else:
                    number, index, key = rest.split(".")
                    moments[int(number)].setdefault(int(index), {})[key] = file.get_tensor(name)
        module.load_state_dict(weights)
        for optimizer, values in zip(optimizers, moments, strict=True):
            optimizer.load_state_dict({"state": values, "param_groups": optimizer.state_dict()["param_groups"]})
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(
            f"cannot resume from {str(path)!r}: {error}; delete it to start over, or choose another output folder"
        ) from error
    return dict(state)


def _check(path: Path, former: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raises ConfigError where a checkpoint is another run's; that it is another drafter's is said first."""
    remedy = "start the former command again to continue it, or choose another output folder"
    known = {name: value for name, value in run.items() if name in former or name not in _NEW}
    for names in (known.keys() & {"drafter"}, {*former, *known} - {"sources"}):
        before, now = ({name: own[name] for name in names if name in own} for own in (former, known))
        if _hashes(before) != _hashes(now):
            check_same_run(path, former.get("sources", {}), known.get("sources", {}), remedy)
        check_same_run(path, before, now, remedy)


def _hashes(run: Mapping[str, Any]) -> list[Any]:
    """The hashes of a run's texts and of its target, which follow from the options in ``sources``."""
    weights = [values["target"] for values in run.values() if isinstance(values, Mapping) and "target" in values]
    return [run.get("data"), run.get("held_out"), *weights]


def state_of(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; empty where there is no checkpoint, or it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            state = parse_json((file.metadata() or {})["state"])
    except (OSError, SafetensorError, LookupError, TypeError, ValueError):
        return {}  # loading it reports the error
    return state if isinstance(state, dict) else {}


def precision_of(path: Path) -> str | None:
    """The precision of a checkpoint's run; None where there is no checkpoint, or it cannot be read."""
    found = state_of(path).get("precision")
    return found if found in ("no", "bf16") else None
