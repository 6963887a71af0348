"""Plain decoding: no draft, one token a step, on the same stack as every drafter. The baseline."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.drafter import Context, DrafterBase, Observation
from specdec.step.tree import Draft

__all__ = ["Plain", "PlainConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig:
    """No options."""


class Plain(DrafterBase):
    """Proposes the root alone."""

    name = "none"
    draws = False
    Config = PlainConfig
    needs_observe = False
    proposes = False

    def start(self, context: Context) -> PlainSession:
        return PlainSession(context)


class PlainSession:
    def __init__(self, context: Context) -> None:
        self._context = context

    def propose(self, row_budget: int) -> Draft:
        return Draft.chain([self._context.root])

    def observe(self, seen: Observation) -> None:
        pass
