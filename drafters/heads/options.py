"""Options that drafters share whose trees grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specdec.errors import ConfigError, shown
from specdec.settings.parsing import check_positive

__all__ = ["GrowingOptions", "HeadOptions"]


@dataclass(frozen=True, kw_only=True)
class GrowingOptions:
    """Options of drafters whose trees grow; subclasses document them, and set ``where`` and defaults of their own.

    Attributes:
        where: beginning of the options' names in error messages.
    """

    where: ClassVar[str]
    tokens: int | None = None
    rows: int | None = None
    branch: int = 8
    min_chance: float | None = None

    def __post_init__(self) -> None:
        check_positive(self.where, tokens=self.tokens, rows=self.rows, branch=self.branch)
        if self.min_chance is not None and not 0 <= self.min_chance <= 1:
            raise ConfigError(f"{self.where}min_chance is {shown(self.min_chance)}; it is a probability, in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(GrowingOptions):
    """Options of drafters that load a head; see GrowingOptions."""

    head: str | None = None
    check_target: bool = True
