"""What a step needs of a sequence, and what a sequence brings to a step's forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.costs.fallback import Fallback
from specdec.costs.prices import BatchLoad
from specdec.drafter import Drafter
from specdec.drafting.joint_forward import ForwardRows
from specdec.results import Statistics, Step
from specdec.sampling.verify import Verdict
from specdec.step.forward_passes import Passes
from specdec.step.tree import Draft
from specdec.target import TargetOutput

__all__ = ["ScheduledRows", "Stepping"]


class Stepping(Protocol):
    """What a step needs of a sequence, see :class:`specdec.engine.sequence.SequenceState`.

    Attributes:
        drafter, stats, steps: of the sequence.
        draws: whether its tokens are sampled.
        fallback: what says when it does not draft, if anything does.
        prefilling: whether the prompt, but its last token, has still to be run.
        scheduled: a draft that has not been run yet, as it found no room in a forward.
    """

    drafter: Drafter
    stats: Statistics
    steps: list[Step]
    draws: bool
    fallback: Fallback | None
    prefilling: bool
    scheduled: ScheduledRows | None

    def propose(self, batch_load: BatchLoad, rests: bool) -> ScheduledRows | Passes[ScheduledRows]:
        """The next draft, or the passes that its session waits for, to be run beside others'."""

    def look_again(self) -> None:
        """Have what a text beside it has run meanwhile, if nothing of the prompt was known or run so far."""

    def chunk(self, most: int) -> ScheduledRows:
        """The next tokens of the prompt, at most so many."""

    def verify(self, rows: ScheduledRows, output: TargetOutput) -> Verdict:
        """The accepted rows and the tokens emitted, cut where the text ends; all rows of a chunk."""

    def commit(self, rows: ScheduledRows, verdict: Verdict, output: TargetOutput) -> None:
        """Make the accepted rows and the tokens part of the text."""

    def observe(self, rows: ScheduledRows, verdict: Verdict, output: TargetOutput) -> None:
        """Show the drafting session what became of its draft."""

    def learn(self, rows: ScheduledRows, verdict: Verdict) -> None:
        """Tell what decides on rows what the step brought."""


@dataclass(slots=True, eq=False)
class ScheduledRows(ForwardRows):
    """What one sequence brings to a forward of the target.

    Attributes:
        sequence: whose rows they are.
        draft: as proposed; None for a chunk of the prompt.
        asked: whether the session proposed it; of other rows it is told no more than of the prompt.
        accepted: the path that verification found, before the text's end cut it.
        drafting, making: seconds that it took to propose the draft, and to make it the rows of a forward.
    """

    sequence: Stepping = field(kw_only=True)
    draft: Draft | None = None
    asked: bool = False
    drafting: float = 0.0
    making: float = 0.0
    accepted: Sequence[int] = ()

    @property
    def is_whole(self) -> bool:
        """Whether its rows are a draft's that go through all layers and all get logits, as in a measured forward."""
        return self.draft is not None and self.entry is None and self.rows is None
