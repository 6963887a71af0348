"""Where multi-token-prediction layers lie: in a folder or a GGUF file, a model's or of their own."""

from __future__ import annotations

from pathlib import Path

import torch

from drafters.heads.mtp_gguf import find_in_gguf
from drafters.heads.mtp_layout import MtpTensors, find_mtp, has_mtp
from drafters.heads.weights import FORMAT
from drafters.shared.weights import WeightsConfig, reading
from specdec.errors import CheckpointError
from specdec.models.gguf import is_gguf
from specdec.models.loading import mtp_layers
from specdec.models.names import model_source
from specdec.target import Target

__all__ = ["fit_of", "layers_in", "own_layers"]

_REMEDY = (
    "it takes a folder or a GGUF file of a model with such layers (GLM-4 MoE, Mellum), or a head of speculators' kind "
    "mtp"
)


def own_layers(target: Target) -> Path | None:
    """The folder or file that a described target was loaded from, if it has such layers; this downloads nothing."""
    if not target.path or target.executor is None:
        return None
    try:
        folder = model_source(target.path, local_files_only=True)
        if is_gguf(folder):
            return folder if mtp_layers(target.config) else None
        with reading("multi-token-prediction layers", folder, _REMEDY):
            return folder if has_mtp(folder) else None
    except (CheckpointError, OSError, ValueError):
        return None


def layers_in(folder: Path, dtype: torch.dtype = torch.float32) -> MtpTensors:
    """The layers in a folder or a file.

    ``dtype``: of the computation.

    Raises:
        CheckpointError: there are none, or they lack parts.
    """
    with reading("multi-token-prediction layers", folder, _REMEDY):
        return find_in_gguf(folder, dtype) if is_gguf(folder) else find_mtp(folder)


def fit_of(found: MtpTensors, vocab_size: int) -> WeightsConfig:
    """The model that the layers fit; a folder without a vocabulary size is taken to fit the target's."""
    with reading("multi-token-prediction layers", found.folder, _REMEDY):
        told = found.values.get("text_config") or found.values.get("transformer_layer_config") or found.values
        vocabulary = told.get("vocab_size") or vocab_size
        target = str(found.values.get("target", "")) if found.values.get("format") == FORMAT else ""
        return WeightsConfig(hidden_size=found.width, vocab_size=int(vocabulary), target=target)
