"""What a model is called, and where it lies: a named model, a folder, a GGUF file, or a model on the hub."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.errors import CheckpointError, ConfigError, shown
from specdec.models.catalog import named_models
from specdec.models.gguf import is_gguf
from specdec.models.gguf_parts import models_among
from specdec.models.hub import HubModel

__all__ = ["NAMES", "model_source"]

NAMES = " or ".join(map(repr, named_models()))


def model_source(
    model: str | Path,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    weights: bool = True,
    code: bool = False,
    local_files_only: bool = False,
) -> Path:
    """The folder or the GGUF file that a name means. On the hub, what is not in its cache is fetched first.

    Args:
        model: ``tiny`` and the like; a folder, or one of a single model in GGUF; a GGUF file, or a part of one; or
            ``me/repo``, and with several GGUF files in it ``me/repo:Q4_K_M``.
        revision: of a repository on the hub.
        subfolder: of a folder or a repository.
        weights, code, local_files_only: as of :meth:`HubModel.fetched`.

    Raises:
        CheckpointError: none of these; or a named model that was not pulled, or that the hub does not give.
        ConfigError: a revision or a subfolder of what has none.
    """
    if (named := named_models().get(str(model))) is not None:
        _refuse(model, "comes with specdec", revision=revision, subfolder=subfolder)
        return named.found()
    path = os.path.expanduser(model)  # as the next ones, it takes any name, also one that no file can have
    if os.path.isdir(path):
        _refuse(model, "is a folder", revision=revision)
        return _in_folder(Path(path), subfolder)
    if os.path.isfile(path) and is_gguf(path):
        _refuse(model, "is a file", revision=revision, subfolder=subfolder)
        return Path(path)
    on_hub = HubModel.named(model, revision, subfolder) if isinstance(model, str) else None
    if on_hub is None or os.path.exists(path) or (is_gguf(path) and on_hub.tag is None):
        wrong = (
            "that is a file" if os.path.exists(path) else f"there is no such {'file' if is_gguf(path) else 'folder'}"
        )
        raise CheckpointError(
            f"cannot load a model from {shown(str(model), 400)}: {wrong}; give {NAMES}, a folder with config.json and "
            "*.safetensors, a GGUF file, or a hub id"
        )
    return on_hub.fetched(weights=weights, code=code, local_files_only=local_files_only)


def _refuse(model: str | Path, what: str, **given: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} is {shown(value)}, and {shown(str(model), 400)} {what}; leave it out")


def _in_folder(folder: Path, subfolder: str | None) -> Path:
    """The folder, or its subfolder, or the one model in GGUF that is there without safetensors.

    Raises:
        CheckpointError: there are several, or no such subfolder.
    """
    inside = folder / (subfolder or "")
    if not inside.is_dir() or Path(subfolder or "").is_absolute() or ".." in Path(subfolder or "").parts:
        raise CheckpointError(f"there is no folder {shown(subfolder)} in {str(folder)!r}; give one that is there")
    names = [path.name for path in inside.iterdir()]
    models = {} if any(name.endswith(".safetensors") for name in names) else models_among(names)
    if len(models) > 1:
        raise CheckpointError(
            f"{str(inside)!r} holds {len(models)} models in GGUF, {', '.join(models)}; give one of these files"
        )
    return inside / next(iter(models.values()))[0] if models else inside
