"""Auto: every source of guesses at once, with only the rows that pay on this machine.

The likeliest rows of the merged tree (:mod:`drafters.union.merge`) are taken as long as their expected gain exceeds
their price (:class:`specdec.costs.prices.Prices`). If no row pays, the step is a plain one.
"""

from __future__ import annotations

from contextlib import suppress

from drafters.union.merge import Merged, MergedConfig
from specdec.drafter import Drafter
from specdec.drafting.registry import make_drafter
from specdec.errors import CheckpointError
from specdec.target import Target

__all__ = ["Auto", "AutoConfig"]


class AutoConfig(MergedConfig):
    drafter = "auto"


class Auto(Merged):
    """The parts, built; where none are named, the Medusa heads in this package are one if they fit the model."""

    name = "auto"
    Config = AutoConfig
    plans_rows = True

    @classmethod
    def made(cls, config: MergedConfig, target: Target) -> list[Drafter]:
        parts = super().made(config, target)
        if config.parts is None:
            with suppress(CheckpointError):  # the heads in the package may be for another model
                parts.append(make_drafter("medusa", target))
        return parts
