"""A drafter's trained weights on disk: tensors and ``config.json`` in a folder, written whole or not at all."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from drafters.shared.fingerprint import architecture, fingerprint
from specdec.errors import CheckpointError, ConfigError, first_line, shown
from specdec.models.loading import embedded_model
from specdec.settings.files import replacing
from specdec.settings.validation import AtLeast1, read_json
from specdec.target import Target

__all__ = [
    "CONFIG",
    "WeightsConfig",
    "check_fit",
    "embedded_weights",
    "load_strictly",
    "load_tensors",
    "read_config",
    "reading",
    "save_weights",
    "weights_folder",
]

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """The model that a drafter's weights were made for.

    Attributes:
        hidden_size: D, the target's hidden size.
        vocab_size: V, the target's vocabulary size.
        target: fingerprint of the target that they were trained for; empty if unknown.
    """

    hidden_size: AtLeast1
    vocab_size: AtLeast1
    target: str = ""


def save_weights(
    folder: Path,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    what: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``name`` and the config; a full disk leaves the earlier files whole.

    ``dtype`` is the dtype of floating-point weights in the file; None keeps each weight's own.

    Raises:
        CheckpointError: the files could not be written; the message says ``what`` they are.
    """
    plain = {
        key: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for key, tensor in tensors.items()
    }
    try:
        with replacing(folder / name) as weights, replacing(folder / CONFIG) as about:
            save_file(plain, weights)
            about.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {what} to {str(folder)!r}: {error}; what stood there before is unchanged"
        ) from error


@contextmanager
def reading(what: str, folder: Path, remedy: str) -> Iterator[None]:
    """A context that turns any error of reading files into a CheckpointError: ``folder`` has no ``what``."""
    try:
        yield
    except Exception as error:  # several libraries' parsers, on files with any content
        raise CheckpointError(f"no {what} in {str(folder)!r}: {first_line(error)}; {remedy}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``; call this within ``reading``."""
    text = (folder / CONFIG).read_bytes()
    try:
        values: dict[str, Any] = read_json(dict[str, Any], text)
    except ValueError as error:
        raise ValueError(f"{CONFIG}: {error}") from None
    return values


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file or a pickle, by name; call this within ``reading``."""
    if path.suffix == ".safetensors":
        return load_file(path)
    try:  # weights_only: a pickle of anything but tensors is refused and not executed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle's version
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # whose message advises to run the pickle
        raise ConfigError(
            f"{path.name} is broken, or a pickle of more than tensors, which could run code and is never loaded; take "
            "safetensors"
        ) from error
    if not isinstance(content, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ConfigError(f"{path.name} holds something else than tensors by name")
    return {str(name): tensor for name, tensor in content.items()}


def load_strictly(module: nn.Module, tensors: Mapping[str, torch.Tensor], source: Path, what: str) -> None:
    """Fill a module. It can be on the device ``meta``: memory is allocated only after the tensors are known to fit.

    Raises:
        CheckpointError: a tensor is missing, left over, of another shape or kind, or not finite.
    """
    own = module.state_dict()
    shapes, expected = ({name: tuple(t.shape) for name, t in side.items()} for side in (tensors, own))
    odd = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    if odd:
        name = odd[0]
        raise CheckpointError(
            f"the weights in {str(source)!r} do not fit {what}: {name!r} is {shapes.get(name, 'missing')}, expected "
            f"{expected.get(name, 'none of that name')} ({len(odd)} tensors differ); the file is broken or of "
            "another model"
        )
    ready: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
            raise CheckpointError(
                f"{name} in {str(source)!r} is of {tensor.dtype}, which means nothing without its scales, and such "
                "weights are not read; take them in bfloat16"
            )
        kinds = [(t.is_floating_point(), t.is_complex(), t.dtype is torch.bool) for t in (tensor, own[name])]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"{name} in {str(source)!r} is of {tensor.dtype}, expected {own[name].dtype}; the file is broken or of "
                "another model"
            )
        ready[name] = tensor.to(own[name].dtype)
        if not bool(ready[name].isfinite().all()):
            raise CheckpointError(f"{name} in {str(source)!r} holds NaN or infinity; train it anew")
    module.load_state_dict(ready, assign=True)


def embedded_weights(drafter: str) -> dict[str, Path]:
    """Fingerprint of a target -> the folder in this package with a drafter's weights for it."""
    folders = sorted(embedded_model().parent.glob(f"*-{drafter}"))
    return {str(read_config(folder)["target"]): folder for folder in folders}


def weights_folder(given: str | None, target: Target, option: str, *, source: str | None = None) -> Path:
    """The folder that was given, or the one in this package whose weights were trained for the target.

    Args:
        option: name of the option that takes the folder: medusa.heads, ...
        source: where to get such weights, as a sentence; None where ``specdec train`` makes them.

    Raises:
        CheckpointError: no folder was given, and this package has no weights for the model.
    """
    if given is not None:
        return Path(given)
    drafter, _, part = option.partition(".")
    held, kind = embedded_weights(drafter), architecture(target)
    if any(own.startswith(kind) for own in held):
        kind = fingerprint(target)
    if kind not in held:
        holds = f"; what the package holds is for {', '.join(held)}" if held else ""
        source = source or f"Train some with `specdec train {drafter} --model ...`"
        alike = next((str(folder) for own, folder in held.items() if own.startswith(architecture(target))), None)
        copy = f"; for a quantised copy, {option}={alike} with {drafter}.check_target=false" if alike else ""
        raise CheckpointError(
            f"{drafter} has no {part} for this model ({kind}){holds}. {source} and give the folder as {option}{copy}"
        )
    return held[kind]


def check_fit(config: WeightsConfig, target: Target, drafter: str, *, check_target: bool = True) -> None:
    """Raises CheckpointError where a drafter's weights do not fit a target, or were trained for another one."""
    for what, own, theirs in (
        ("width", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise CheckpointError(
                f"the {drafter} weights are for another model: their {what} is {shown(own)}, the model's is {theirs}; "
                "take those trained for this model"
            )
    if check_target and config.target and config.target != (given := fingerprint(target)):
        raise CheckpointError(
            f"the {drafter} weights were trained for {config.target}, this model is {given}; use their own model, or "
            f"{drafter}.check_target=false to try them all the same (output stays exact, acceptance will suffer)"
        )
