"""Tensor parallelism: each weight is split over processes by transformers' plan, ``tp_plan="auto"``.

All ranks run every row. Their results are nearly equal, as the same sums are sent to all ranks; to be exact, all ranks
use rank 0's logits and the hidden states that a drafter reads. Before a forward the ranks compare their rows, as a
difference would hang or fail inside a layer's collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from specdec.parallel.ranks import checksum
from specdec.parallel.target import ParallelTarget
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput

__all__ = ["TensorTarget"]


class TensorTarget(ParallelTarget):
    """A target whose weights are spread over ranks; every drafter and acceptance rule works."""

    kind, splits = "tensor", False

    def forward(self, step: StepInput) -> StepOutput:
        if not self.together:
            return self._target.forward(step)
        length, first, exit_layer = step.lengths[0], step.tree[-1] - step.rows, step.plan.last
        enters: Any = (-1,) if step.entering is None else step.entering.layer
        own = checksum(  # of one text: the engine refuses batches
            step.ids.tolist(),
            [] if step.chain[0] else step.parents.tolist(),
            [length, first, *enters, -1 if exit_layer is None else exit_layer, *step.plan.parts],
            [-1] if step.wanted.logits is None else step.wanted.logits.tolist(),
        )
        begins = length + first == 0  # a text; before it, ranks may have been busy otherwise
        found = self.ranks.gather(torch.tensor([own], dtype=torch.int32), patient=begins)
        self.ranks.check_equal("the rows", found[:, 0].tolist())
        output = self._target.forward(step)
        read = [*output.hidden.values(), *([] if output.logits is None else [output.logits])]
        if exit_layer is not None:
            read.append(output.out)
        if read:
            led = self.ranks.lead(torch.cat([tensor.flatten() for tensor in read]))
            for tensor, part in zip(read, torch.split(led, [tensor.numel() for tensor in read]), strict=True):
                tensor.copy_(part.view_as(tensor))
        return output

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole parameters, each brought together in turn; all ranks have to go through them."""
        for name, weight in self._target.named_weights():
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight
