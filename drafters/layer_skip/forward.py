"""What is left out of a target that drafts for itself, into the draft rows' slots in its own cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec.step.step_io import LayerPlan, Part

__all__ = ["Skip"]


@dataclass(frozen=True)
class Skip:
    """The sublayers to leave out: the layers whose ``attention`` is not run, and those whose ``mlp`` is not."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def of(cls, layers: Iterable[int], attention: Iterable[int] = (), mlp: Iterable[int] = ()) -> Skip:
        """Whole ``layers``, and of others the attention or the MLP alone."""
        whole = frozenset(layers)
        return cls(whole | {*attention}, whole | {*mlp})

    @property
    def whole(self) -> frozenset[int]:
        """The layers of which nothing is run."""
        return self.attention & self.mlp

    def __bool__(self) -> bool:
        return bool(self.attention or self.mlp)

    def plan(self, layers: int) -> LayerPlan:
        """The plan for a model with this number of layers.

        A sublayer of attention that runs stores its keys and values in the rows' slots; one that is left out stores
        none, and none of the draft's rows looks for them.
        """
        none = Part(0)
        attends = [none if layer in self.attention else Part.ATTENTION for layer in range(layers)]
        return LayerPlan(parts=tuple(own if layer in self.mlp else own | Part.MLP for layer, own in enumerate(attends)))
