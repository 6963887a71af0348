"""Rival: the interface of other decoding implementations, as systems of the bench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.bench.plan import Plan
from specdec.bench.records import Output
from specdec.engine.engine import Engine
from specdec.errors import check_choice

__all__ = ["Rival", "spelt_out"]


class Rival:
    """The common part of rivals; subclasses define their ``Options`` and how they answer."""

    ours = False
    lossy = False
    Options: ClassVar[dict[str, Any]] = {}

    def __init__(self, label: str, engine: Engine, plan: Plan, options: Mapping[str, Any]) -> None:
        for name in options:
            check_choice(f"option of {label}", name, self.Options)
        self.label, self.options = label, {**self.Options, **options}
        self.target, self.plan = engine.target, plan
        self.comparable = plan.temperature == 0  # above T=0, its random numbers differ from ours

    @classmethod
    def build(cls, label: str, engine: Engine, plan: Plan, options: Mapping[str, Any]) -> Rival:
        return cls(label, engine, plan, options)

    def warm_up(self, prompt: list[int], budget: int) -> None:
        self.answer(prompt, budget)

    def reset(self) -> None:
        pass

    def answer(self, prompt: list[int], budget: int) -> Output:
        raise NotImplementedError


def spelt_out(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """A spec's name and options, without its label."""
    return {"name": spec} if isinstance(spec, str) else {key: spec[key] for key in spec if key != "label"}
