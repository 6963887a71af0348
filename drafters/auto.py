"""Auto: every source of guesses at once, with only the rows that pay on this machine.

The likeliest rows of the merged tree (:mod:`drafters.union.merge`) are taken as long as their expected gain exceeds
their price (:class:`specdec.costs.prices.Prices`). If no row pays, the step is a plain one.
"""

from __future__ import annotations

import warnings
from contextlib import suppress

from drafters.heads.eagle import Eagle
from drafters.heads.mtp_finding import own_layers
from drafters.union.merge import Merged, MergedConfig
from specdec.drafter import Drafter
from specdec.drafting.registry import make_drafter
from specdec.errors import CheckpointError, SpecdecWarning
from specdec.target import Target

__all__ = ["Auto", "AutoConfig"]


class AutoConfig(MergedConfig):
    drafter = "auto"


class Auto(Merged):
    """The parts, built. Where none are named, the model's own multi-token-prediction layers are one if its checkpoint
    has them. So is the EAGLE head in this package, if there is one for the model, where a pass of it is one call: of
    native CPU layers, or of a graph on a GPU. Else the package's Medusa heads for the model are.
    """

    name = "auto"
    Config = AutoConfig
    plans_rows = True

    @classmethod
    def made(cls, config: MergedConfig, target: Target) -> list[Drafter]:
        parts = super().made(config, target)
        if config.parts is not None:
            return parts
        if not target.splits and own_layers(target) is not None:
            try:
                parts.append(make_drafter("mtp", target))
            except CheckpointError as error:
                warnings.warn(f"auto drafts without the model's own layers: {error}", SpecdecWarning, stacklevel=2)
        with suppress(CheckpointError):  # the heads in the package may be for another model
            head = make_drafter("eagle", target) if Eagle.may_be_one_call(target) else None
            if isinstance(head, Eagle) and head.is_one_call:  # else each of its passes is many launches
                return [*parts, head]
        with suppress(CheckpointError):
            parts.append(make_drafter("medusa", target))
        return parts
