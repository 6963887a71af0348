"""An EAGLE head's passes as CUDA graphs: of text rows, which read the target's hidden states, and of drafted rows.

A pass of the head is some forty operations beside its products. Recorded, it is one launch
(:mod:`specdec.runners.graphs`), with the attention that a target's steps have. Embeddings are looked up before it, and
a graph computes logits of all its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from drafters.heads.forward import HeadForward
from drafters.heads.layers import Linear
from drafters.heads.recorded_layers import RecordedLayers
from specdec.decoder.rope import RopeTables
from specdec.runners.graphs import LOGITS, CosSin, Outcome, StepGraphs, StepInputs
from specdec.runners.recording import Recording
from specdec.runners.rows import Rows

__all__ = ["MOST_RECORDED", "RecordedChain"]

MOST_RECORDED = 16  # rows of a sequence; more come after rests and in prompts, and compute for longer than they launch


class RecordedChain:
    """The recorded passes of a head.

    Args:
        forward: the head.
        head: gives logits.
        recording: of the target's runner.
        ropes: the head's rotary positions.
        mask: [1, taps x D] what heads that draft all depths read in the place of hidden states that are not known.
    """

    def __init__(
        self,
        forward: HeadForward,
        head: Linear,
        recording: Recording,
        ropes: RopeTables,
        mask: torch.Tensor | None,
    ) -> None:
        self._layers, self._head, self._mask = RecordedLayers(forward, recording, ropes), head, mask
        self._forward, self._width = self._layers.forward, forward.spec.width
        self._text = StepGraphs(recording.recorder, self._text_rows)
        self._drafted = StepGraphs(recording.recorder, self._drafted_rows)

    @property
    def failed(self) -> str | None:
        """Why passes are launched one by one after all, or None."""
        return self._text.failed or self._drafted.failed

    def run(
        self, rows: Rows, brought: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]], embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits [T, d] and states [T, W] of all rows; None where they are not recorded.

        Sequences whose rows are text and others whose rows are drafted are not recorded together.

        Args:
            rows: T rows; their keys and values are stored.
            brought: per sequence, hidden states of the target [T', taps x D] for its first rows, and of the head
                itself [T", W] for the others.
            embedded: [T, W] the rows' embeddings.
        """
        kinds = {features is not None for features, _ in brought}
        graphs = self._text if True in kinds else self._drafted
        most = max(rows.step.counts)
        if len(kinds) > 1 or most > MOST_RECORDED or self.failed or not graphs.takes(rows):
            return None
        if rows.end > self._layers.longest:
            self._layers.longest = self._text.kind = self._drafted.kind = 2 * rows.end
        parts = list[torch.Tensor]()
        for features, states in brought:
            if features is not None:
                parts.append(features.to(embedded))
            if states is not None:
                parts.append(states if features is None or self._mask is None else self._mask.expand(len(states), -1))
        hidden = torch.cat((embedded, torch.cat(parts)), -1)
        cos_sin = self._layers.cos_sin(rows, embedded.device)
        outcome = graphs.run(hidden, rows, 0, len(self._forward.layers), {LOGITS}, cos_sin)
        return None if outcome is None else (outcome[1][LOGITS], outcome[0])

    def _text_rows(
        self, hidden: torch.Tensor, rows: StepInputs, first: int, last: int, taps: Collection[int], cos_sin: CosSin
    ) -> Outcome:
        states = self._forward.fused(hidden[:, self._width :])
        return self._pass(hidden[:, : self._width], states, rows, cos_sin)

    def _drafted_rows(
        self, hidden: torch.Tensor, rows: StepInputs, first: int, last: int, taps: Collection[int], cos_sin: CosSin
    ) -> Outcome:
        return self._pass(hidden[:, : self._width], hidden[:, self._width :], rows, cos_sin)

    def _pass(self, embedded: torch.Tensor, states: torch.Tensor, rows: StepInputs, cos_sin: CosSin) -> Outcome:
        """States for the next level, and logits, of the rows' embeddings and states [B, W]."""
        layers, where = self._layers, rows.where()
        where["paths"] = layers.kernels.paths(where)

        def attend(place: int, inputs: torch.Tensor) -> torch.Tensor:
            return layers.attend(place, inputs, cos_sin, where, where, rows.windows[place])

        hidden, reads = self._forward.entering(embedded, states)
        last, onward = self._forward.ends(self._forward.through(hidden, attend, reads=reads))
        return onward, {LOGITS: self._head(last)}
