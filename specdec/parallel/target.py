"""ParallelTarget: base class of targets that several processes run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, ClassVar

from specdec.costs.curve import CostCurve
from specdec.costs.measuring import describe, kept_curve, new_curve, stored_at
from specdec.parallel.ranks import Ranks, checksum, content
from specdec.sampling.sampler import Sampler
from specdec.target import Target

__all__ = ["ParallelTarget"]


class ParallelTarget:
    """A target that several processes run together; every process makes it and makes the same calls.

    What is said here is of all of them; the rest is the process's own target's.

    Args:
        target: this process's.
        ranks: the processes; None takes torch.distributed's.

    Attributes:
        kind: as in ``parallel=``.
        ranks: the processes.
        splits: whether a step's rows are split over them.
        together: False while it is measured, when nothing is split or compared.
    """

    shared = True
    kind: ClassVar[str]
    splits: ClassVar[bool]

    def __init__(self, target: Target, *, ranks: Ranks | None = None) -> None:
        self._target, self.together = target, True
        self.ranks = ranks or Ranks()
        self.options = {**target.options, "parallel": f"{self.kind} over {self.ranks.size}"}

    def __getattr__(self, name: str) -> Any:
        if name == "_target" or name.startswith("__"):  # of a copy, which has nothing yet
            raise AttributeError(name)
        return getattr(self._target, name)

    def agreed_curve(self, progress: Callable[[float], None] | None = None) -> CostCurve:
        """The cost curve of all ranks: rank 0's kept one, else measured by all ranks together by rank 0's clock.

        Where rows are split over ranks, the curve is stretched accordingly.
        """
        own: Any = self
        ranks, machine = self.ranks, describe(own)
        kept = kept_curve(machine) if ranks.rank == 0 else None
        known = ranks.broadcast(None if kept is None else asdict(kept))
        if known is None:
            self.together = False
            try:
                place = stored_at(machine) if ranks.rank == 0 else None
                known = asdict(new_curve(own, place, progress, clock=ranks.clock))
            finally:
                self.together = True
        curve = CostCurve(**known)
        share = ranks.size if self.splits else 1
        return replace(curve, rows=[1 + (row - 1) * share for row in curve.rows])

    def greet(self, sampler: Sampler, **others: Any) -> None:
        """At the start of a text, see that all ranks begin the same one in the same way.

        Args:
            sampler: the text's, with its prompt.
            others: whatever else decides the text, by the name that an error gives it.

        Raises:
            ParallelError: they do not.
        """
        own: Any = self
        model = [item for item in describe(own).items() if item[0] not in ("device", "library")]  # may be their own
        values = {
            "the_model": model,
            "the_prompt": sampler.tokens,
            "the_sampling": (repr(sampler.params), sampler.sample, sampler.processors),
            **others,
        }
        self.ranks.agree(**{name: checksum(content(value)) for name, value in values.items()})

    def describe(self) -> dict[str, dict[str, Any]]:
        found = self._target.describe()
        found["execution"]["parallel"] = self.options["parallel"]
        return found
