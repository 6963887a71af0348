"""Auto: every source of guesses at once, and of their rows those that pay on this machine.

Of the merged tree (:mod:`drafters.merge`) the likeliest rows are taken as long as what they bring exceeds what their
time would have brought otherwise (:class:`specdec.policy.Prices`), down to none, which is a plain step.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from drafters.merge import PARTS, Merged, check_options
from specdec.errors import CheckpointError
from specdec.registry import make_drafter
from specdec.target import Target

__all__ = ["Auto", "AutoConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """Options.

    Attributes:
        parts: drafters, each a name or ``{"name": ..., **options}``, the cheapest first: a row that two of them propose
            is put down to the first. None takes suffix automaton, token recycling, lookahead, and the Medusa heads in
            this package where they fit the model.
        rows: most rows below the root; None leaves it to the engine's ``max_rows``.
        memory: weight of the past in a part's worth and in a row's chance, from one step to the next.
    """

    parts: list[Any] | None = None
    rows: int | None = None
    memory: float = 0.96

    def __post_init__(self) -> None:
        check_options("auto", self.parts, self.rows, self.memory)


class Auto(Merged):
    """The parts, built."""

    name = "auto"
    Config = AutoConfig
    plans_rows = True

    @classmethod
    def build(cls, config: AutoConfig, target: Target) -> Auto:
        """Make the parts for a target.

        Raises:
            ConfigError: an unknown drafter or option.
        """
        parts = [make_drafter(part, target) for part in config.parts or PARTS]
        if config.parts is None:
            with suppress(CheckpointError):  # the heads in the package may be for another model
                parts.append(make_drafter("medusa", target))
        return cls(config, parts)
