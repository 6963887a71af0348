"""A DFlash or DSpark head's pass as a CUDA graph: new rows of text, and behind them the rows of a block.

The rows of text have keys and values alone, which come from the target's hidden states. They pass the layers like the
block's rows all the same, and what comes out of them is not read. So one graph does for any number of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from drafters.heads.config import BlockConfig
from drafters.heads.forward import HeadForward
from drafters.heads.layers import Linear
from drafters.heads.recorded_layers import RecordedLayers
from specdec.decoder.rope import RopeTables
from specdec.runners.graphs import LOGITS, CosSin, Outcome, StepGraphs, StepInputs
from specdec.runners.recording import Recording
from specdec.runners.rows import Rows

__all__ = ["RecordedBlock"]


class RecordedBlock:
    """The recorded pass of a head without convolutions and windows.

    Args:
        forward: the head.
        head: gives logits.
        recording: of the target's runner.
        ropes: the head's rotary positions.
        block_size: rows of a block.

    Attributes:
        most: most rows of a sequence in a graph. After rests and in prompts there are more, which are launched.
    """

    def __init__(
        self, forward: HeadForward, head: Linear, recording: Recording, ropes: RopeTables, block_size: int
    ) -> None:
        self._layers, self._head, self._size = RecordedLayers(forward, recording, ropes), head, block_size
        self._graphs = StepGraphs(recording.recorder, self._pass)
        self.most = 2 * block_size

    @property
    def failed(self) -> str | None:
        """Why passes are launched operation by operation after all, or None."""
        return self._graphs.failed

    @classmethod
    def fits(cls, config: BlockConfig) -> bool:
        """Whether a graph can run a head: each row of a block sees all rows, and needs no others but for attention."""
        return not config.conv_kernel and all(config.window(layer) is None for layer in range(config.layers))

    def run(
        self, rows: Rows, features: Sequence[torch.Tensor], embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Hidden states [T, W] behind the last norm, and logits [T, d], of all rows; None where they are not recorded.

        Args:
            rows: T rows, of each sequence its text's and its block's; keys and values are stored.
            features: per sequence, hidden states of the target [T', taps x D] for its rows of text.
            embedded: [T, W] the rows' embeddings; those of text are not read.
        """
        if max(rows.step.counts) > self.most or not self._graphs.takes(rows):
            return None
        if rows.end > self._layers.longest:
            self._layers.longest = self._graphs.kind = 2 * rows.end
        parts = list[torch.Tensor]()
        for own in features:
            text = torch.cat((own.to(embedded), embedded.new_ones(len(own), 1)), -1)
            parts += [text, text.new_zeros(self._size, text.shape[1])]
        hidden = torch.cat((embedded, torch.cat(parts)), -1)
        cos_sin = self._layers.cos_sin(rows, embedded.device)
        outcome = self._graphs.run(hidden, rows, 0, len(self._layers.forward.layers), {LOGITS}, cos_sin)
        return None if outcome is None else (outcome[0], outcome[1][LOGITS])

    def _pass(
        self, hidden: torch.Tensor, rows: StepInputs, first: int, last: int, taps: Collection[int], cos_sin: CosSin
    ) -> Outcome:
        layers, forward, where = self._layers, self._layers.forward, rows.where()
        embedded, features, is_text = hidden.tensor_split([forward.spec.width, hidden.shape[1] - 1], -1)
        context, seen = forward.fused(features), _all_seen(where)

        def attend(place: int, inputs: torch.Tensor) -> torch.Tensor:
            return layers.attend(place, torch.where(is_text > 0, context, inputs), cos_sin, where, seen)

        states, _ = forward.ends(forward.through(embedded, attend))
        return states, {LOGITS: self._head(states)}


def _all_seen(where: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arrays of a step (:mod:`specdec.runners.packed_step`) whose rows are seen by all rows of their sequence.

    Attention takes each of them for the last row of a chain.
    """
    counts, closure = where["counts"], where["closure"]
    reach = torch.arange(closure.shape[-1], dtype=torch.int32, device=counts.device)
    last = counts[..., :1] + counts[..., 2:] - 1
    return {
        **where,
        "places": last.expand(where["places"].shape).contiguous(),
        "closure": (reach < counts[..., 2:]).unsqueeze(-2).expand(closure.shape).contiguous(),
        "paths": reach.repeat(closure.numel() // closure.shape[-1], 1),
    }
