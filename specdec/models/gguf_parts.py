"""Models in GGUF files: which files are one, and which parts belong together, as llama.cpp's gguf-split leaves them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from specdec.errors import CheckpointError, shown

__all__ = ["check_part", "check_tensor_count", "models_among", "parts_named", "parts_of", "stem_of"]

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_MOST = 1 << 16  # llama.cpp keeps both numbers in 16 bits
_BESIDE = ("mmproj", "imatrix")  # in names of files that are no models
_OWN = ("split.", "general.alignment", "GGUF.")  # keys that each part has for itself
_ANEW = "get all parts again, from one place"


def models_among(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files among some, by the first part of each model: name -> names of all its parts that are there.

    Projectors and importance matrices, which lie beside models and are none, are left out.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        base = PurePosixPath(name).name.lower()
        if base.endswith(".gguf") and not any(word in base for word in _BESIDE):
            part = _NAME.fullmatch(name)
            models.setdefault(name if part is None else _file_name(part[1], 0, int(part[3])), []).append(name)
    return models


def parts_named(name: str) -> list[str]:
    """The names of all parts of the model that a file is a part of, by its name."""
    part = _NAME.fullmatch(name)
    return [name] if part is None else [_file_name(part[1], at, int(part[3])) for at in range(int(part[3]))]


def stem_of(name: str) -> str:
    """A GGUF file's name without its ending and a part's number."""
    part = _NAME.fullmatch(name)
    return name[: -len(".gguf")] if part is None else part[1]


def _file_name(stem: str, number: int, count: int) -> str:
    """The name of part ``number``, counted from 0, of ``count``."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def parts_of(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The files of a model in order, where ``path`` is one of them and has these settings; the first has all settings.

    Raises:
        CheckpointError: parts are missing, or its name and its settings contradict each other.
    """
    count = _whole(path, metadata, _COUNT, 0)
    if count <= 1:
        return [path]
    number = _whole(path, metadata, _NUMBER)
    if number >= count:
        raise CheckpointError(f"{str(path)!r} says {_NUMBER} {number} and {_COUNT} {count}; it is broken: {_ANEW}")
    named = _NAME.fullmatch(path.name)
    if named is None or (int(named[2]), int(named[3])) != (number + 1, count):
        raise CheckpointError(
            f"{str(path)!r} is part {number + 1} of {count} of a split model ({_NUMBER} {number}, {_COUNT} {count}), "
            f"and its name does not end in {_file_name('', number, count)!r}, by which the other parts are found; give "
            "all parts the names that they were published with"
        )
    parts = [path.with_name(name) for name in parts_named(path.name)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{str(path)!r} is part {number + 1} of {count} of a split model, and {len(missing)} of them "
            f"{'is' if len(missing) == 1 else 'are'} not beside it, such as {missing[0]!r}; get all parts into one "
            "folder"
        )
    return parts


def check_part(path: Path, number: int, count: int, metadata: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a part's settings are not those of part ``number`` of ``count``, or contradict the
    first's.
    """
    for key, expected in ((_NUMBER, number), (_COUNT, count)):
        if (said := metadata.get(key)) != expected:
            raise CheckpointError(
                f"{str(path)!r} says {key} {shown(said)}, and by its name it is part {number + 1} of {count}, which "
                f"says {expected}; it was renamed or is of another model: {_ANEW}"
            )
    for key, said in metadata.items():
        own = key != _TENSORS and key.startswith(_OWN)
        if not own and key in first and said != first[key]:
            raise CheckpointError(
                f"{str(path)!r} says {key} {shown(said)}, and the first part {shown(first[key])}: they are of two "
                f"models; {_ANEW}"
            )


def check_tensor_count(paths: Sequence[Path], first: Mapping[str, Any], found: int) -> None:
    """Raises CheckpointError where the parts hold another number of tensors than the first one says."""
    said = first.get(_TENSORS)
    if said != found:
        raise CheckpointError(
            f"{str(paths[0])!r} says {_TENSORS} {shown(said)}, and its {len(paths)} parts hold {found} tensors; {_ANEW}"
        )


def _whole(path: Path, metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 <= value < _MOST:
        raise CheckpointError(f"{str(path)!r} says {key} {shown(value)}, which is no number of parts; {_ANEW}")
    return value
