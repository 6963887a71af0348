"""A drafter's weights on disk: safetensors and ``config.json`` in a folder, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specdec.errors import CheckpointError
from specdec.files import replacing

__all__ = ["CONFIG", "mismatches", "save_weights"]

CONFIG = "config.json"

Shapes = Mapping[str, tuple[int, ...]]


def save_weights(
    folder: Path, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, what: str
) -> None:
    """Write ``name`` and the config; a full disk leaves the former files whole.

    Raises:
        CheckpointError: the files could not be written; ``what`` is what they hold.
    """
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    try:
        with replacing(folder / name) as weights, replacing(folder / CONFIG) as about:
            save_file(plain, weights)
            about.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {what} to {str(folder)!r}: {error}; what stood there before is unchanged"
        ) from error


def mismatches(tensors: Mapping[str, torch.Tensor], expected: Shapes) -> list[str]:
    """What is missing, left over or of another shape, by name; nothing if the tensors fit."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return [
        f"{name!r} is {found.get(name, 'missing')}, expected {expected.get(name, 'none of that name')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
