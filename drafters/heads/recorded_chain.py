"""An EAGLE head's passes as CUDA graphs: of text rows, which read the target's hidden states, and of drafted rows.

A pass of the head is some forty operations beside its products. Recorded, it is one launch
(:mod:`specdec.runners.graphs`), with the attention that a target's steps have. Embeddings are looked up before it, and
a graph computes logits of all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from drafters.heads.config import ChainConfig
from drafters.heads.layers import LayerStep
from specdec.runners.graphs import LOGITS, CosSin, Outcome, StepGraphs, StepInputs
from specdec.runners.recording import Recording
from specdec.runners.rotary import Rotary
from specdec.runners.rows import Rows

__all__ = ["MOST_RECORDED", "RecordedChain"]

MOST_RECORDED = 16  # rows of a sequence; more come after rests and in prompts, and compute for longer than they launch


class RecordedChain:
    """The recorded passes of a head.

    Args:
        config: the head's config.
        recording: of the target's runner.
        rotary: the head's rotary positions.
        mask: [1, taps x D] what heads that draft all depths read in the place of hidden states that are not known.
        fused, through, ends: the parts of a pass, see :class:`drafters.heads.chain_step.ChainStep`.
    """

    def __init__(
        self,
        config: ChainConfig,
        recording: Recording,
        rotary: Rotary,
        mask: torch.Tensor | None,
        *,
        fused: Callable[..., torch.Tensor],
        through: Callable[..., torch.Tensor],
        ends: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._config, self._kernels, self._longest = config, recording.kernels, recording.longest
        self._rotary, self._mask = rotary, mask
        self._fused, self._through, self._ends = fused, through, ends
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
        if rows.end > self._longest:
            self._longest = self._text.kind = self._drafted.kind = 2 * rows.end
        parts = list[torch.Tensor]()
        for features, states in brought:
            if features is not None:
                parts.append(features.to(embedded))
            if states is not None:
                parts.append(states if features is None or self._mask is None else self._mask.expand(len(states), -1))
        hidden = torch.cat((embedded, torch.cat(parts)), -1)
        cos_sin = self._rotary.cos_sin(rows, embedded)
        outcome = graphs.run(hidden, rows, 0, self._config.layers, {LOGITS}, cos_sin)
        return None if outcome is None else (outcome[1][LOGITS], outcome[0])

    def _text_rows(
        self, hidden: torch.Tensor, rows: StepInputs, first: int, last: int, taps: Collection[int], cos_sin: CosSin
    ) -> Outcome:
        width = self._config.width
        return self._pass(hidden[:, :width], self._fused(hidden[:, width:], self._norm), rows, cos_sin)

    def _drafted_rows(
        self, hidden: torch.Tensor, rows: StepInputs, first: int, last: int, taps: Collection[int], cos_sin: CosSin
    ) -> Outcome:
        width = self._config.width
        return self._pass(hidden[:, :width], hidden[:, width:], rows, cos_sin)

    def _pass(self, embedded: torch.Tensor, states: torch.Tensor, rows: StepInputs, cos_sin: CosSin) -> Outcome:
        """States for the next level, and logits, of the rows' embeddings and states [B, W]."""
        kernels, config, where = self._kernels, self._config, rows.where()
        where["paths"] = kernels.paths(where)
        segments, shape = kernels.segments_of(self._longest), (config.heads, config.key_heads, config.head_dim)

        def attended(place: int, layer: LayerStep, inputs: torch.Tensor) -> torch.Tensor:
            heads = layer.heads(inputs).contiguous()
            query = kernels.turn_and_store(heads, *cos_sin, layer.head_norms, where, place, shape)
            mixed = kernels.step_attention(
                query, where, place, config.key_heads, rows.windows[place], config.head_dim**-0.5, segments
            )
            return layer.projected(mixed)

        hidden = self._through(embedded, states, attended, norm=self._norm)
        logits, onward = self._ends(hidden, self._norm)
        return onward, {LOGITS: logits}

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor = self._kernels.add_norm(hidden, None, weight, eps)[1]
        return normed
