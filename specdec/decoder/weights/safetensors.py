"""Safetensors: a folder's tensors, mapped from its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specdec.decoder.weights.source import DenseSource
from specdec.errors import CheckpointError, told
from specdec.runners.memory_pages import FilePages
from specdec.settings.files import read_object

__all__ = ["FLOATS", "SafetensorsSource", "dtype_name", "opened_tensors"]

FLOATS: Mapping[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The plain floats among the dtypes of a file."""


def dtype_name(kind: str) -> str:
    """A file's name of a dtype as torch has it, of integers."""
    sizes = {"I": "int", "U": "uint"}
    return f"{sizes[kind[0]]}{kind[1:]}" if kind[0] in sizes and kind[1:].isdigit() else kind


def opened_tensors(folder: Path) -> dict[str, Any]:
    """The names of a checkpoint's tensors -> the open file of each.

    Raises:
        CheckpointError: a file of weights is not there, or the index and the files contradict each other.
    """
    index = folder / "model.safetensors.index.json"
    sharded = index.exists() and not (folder / "model.safetensors").is_file()  # as transformers: one file is first
    places = {str(key): str(name) for key, name in read_object(index)["weight_map"].items()} if sharded else None
    names = {*places.values()} if places is not None else {"model.safetensors"}
    for name in sorted(names):
        if ".." in Path(name).parts or Path(name).is_absolute() or not (folder / name).is_file():
            raise CheckpointError(f"{str(folder)!r} has no {name!r}; download the checkpoint anew")
    files: dict[str, Any] = {name: safe_open(folder / name, framework="pt") for name in sorted(names)}
    held = {name: dict.fromkeys(file.keys()) for name, file in files.items()}
    every = {key: files[name] for name, keys in held.items() for key in keys}  # in transformers' order
    if places is None:
        return every
    if lost := [key for key, name in places.items() if key not in held[name]]:
        raise CheckpointError(
            f"{str(index)!r} says that {places[lost[0]]!r} has {lost[0]!r}, which it has not; download both anew"
        )
    if loose := sorted(every.keys() - {*places}):
        raise CheckpointError(
            f"{str(folder)!r} has {len(loose)} tensors that {index.name} does not name, such as {loose[0]!r}; download "
            "the checkpoint anew"
        )
    return every | {key: files[name] for key, name in places.items()}  # one may be left in another, of an older save


class SafetensorsSource(DenseSource):
    """The tensors of a folder's files; as of :class:`specdec.decoder.weights.source.Source`.

    Attributes:
        dtype: of the first tensor of floats, which transformers takes for all.

    Raises:
        CheckpointError: a file is not there, or broken.
    """

    def __init__(self, folder: Path) -> None:
        self.where = repr(str(folder))
        try:
            self._files = opened_tensors(folder)
            headers = {name: file.get_slice(name) for name, file in self._files.items()}
        except (SafetensorError, KeyError, OSError) as error:
            raise CheckpointError(f"cannot read {self.where}: {told(error)}; download the checkpoint anew") from error
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(header.get_shape()) for name, header in headers.items()
        }
        self.strange: Mapping[str, str] = {
            name: dtype_name(dtype) for name, one in headers.items() if (dtype := one.get_dtype()) not in FLOATS
        }
        kinds = (header.get_dtype() for header in headers.values())
        self.dtype = next((FLOATS[kind] for kind in kinds if kind in FLOATS), torch.float32)
        self._pages: FilePages | None = None

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def release(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._pages is None:
            self._pages = FilePages()  # when the files are mapped, which they are not before they are read
        self._pages.release(tensors)
