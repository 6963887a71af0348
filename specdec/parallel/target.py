"""ParallelTarget: base class of targets that several processes run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar

from transformers import PreTrainedModel

from specdec.costs.curve import CostCurve
from specdec.costs.measuring import describe, kept_curve, new_curve, stored_at
from specdec.models.transformers_target import TransformersTarget
from specdec.parallel.ranks import Ranks, checksum
from specdec.sampling.sampler import Sampler

__all__ = ["ParallelTarget"]


class ParallelTarget(TransformersTarget):
    """A target that several processes run together; every process makes it and makes the same calls.

    Args:
        model: as for TransformersTarget, like ``options``.
        ranks: the processes; None takes torch.distributed's.

    Attributes:
        kind: as in ``parallel=``.
        ranks: the processes.
        splits: whether a step's rows are split over them.
    """

    kind: ClassVar[str]
    splits: ClassVar[bool]

    def __init__(self, model: PreTrainedModel, *, ranks: Ranks | None = None, **options: Any) -> None:
        self.together = False  # while it is checked and measured, nothing is split or compared
        self.ranks = ranks or Ranks()
        first = self.ranks.rank == 0
        if self.splits and not first:  # what rank 0 times and keeps, the others read
            self.ranks.wait()
        super().__init__(model, **options)
        if self.splits and first:
            self.ranks.wait()
        self.options["parallel"] = f"{self.kind} over {self.ranks.size}"
        self.together = True

    def agreed_curve(self, progress: Callable[[float], None] | None = None) -> CostCurve:
        """The cost curve of all ranks: rank 0's kept one, else measured by all ranks together by rank 0's clock.

        Where rows are split over ranks, the curve is stretched accordingly.
        """
        ranks, machine = self.ranks, describe(self)
        kept = kept_curve(machine) if ranks.rank == 0 else None
        known = ranks.broadcast(None if kept is None else asdict(kept))
        if known is None:
            self.together = False
            try:
                place = stored_at(machine) if ranks.rank == 0 else None
                known = asdict(new_curve(self, place, progress, clock=ranks.clock))
            finally:
                self.together = True
        curve = CostCurve(**known)
        share = ranks.size if self.splits else 1
        return replace(curve, rows=[1 + (row - 1) * share for row in curve.rows])

    def greet(self, sampler: Sampler, *, taps: int, top_k: int) -> None:
        """At the start of a text, see that all ranks begin the same one in the same way.

        Raises:
            ParallelError: they do not.
        """
        processors = " ".join(type(one).__name__ for one in sampler.processors)
        model = [item for item in describe(self).items() if item[0] not in ("device", "library")]  # may be their own
        self.ranks.agree(
            the_model=checksum(repr(model)),
            the_prompt=checksum(sampler.tokens),
            the_sampling=checksum(repr(sampler.params), str(sampler.sample), processors),
            the_drafter=checksum([taps, top_k]),
        )

    def describe(self) -> dict[str, dict[str, Any]]:
        found = super().describe()
        found["execution"]["parallel"] = self.options["parallel"]
        return found
