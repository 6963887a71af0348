"""A DFlash or DSpark head's pass as a CUDA graph: new rows of text, and behind them the rows of a block.

The rows of text have keys and values alone, which come from the target's hidden states. They pass the layers like the
block's rows all the same, and what comes out of them is not read. So one graph does for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from drafters.heads.config import BlockConfig
from drafters.heads.layers import LayerStep
from specdec.runners.graphs import LOGITS, CosSin, Outcome, StepGraphs, StepInputs
from specdec.runners.recording import Recording
from specdec.runners.rotary import Rotary
from specdec.runners.rows import Rows

__all__ = ["RecordedBlock"]


class RecordedBlock:
    """The recorded pass of a head without convolutions and windows.

    Args:
        config: the head's config.
        recording: of the target's runner.
        rotary: the head's rotary positions.
        context, through, ends: the parts of a pass, see :class:`drafters.heads.block_step.BlockStep`.

    Attributes:
        most: most rows of a sequence in a graph. After rests and in prompts there are more, which are launched.
    """

    def __init__(
        self,
        config: BlockConfig,
        recording: Recording,
        rotary: Rotary,
        *,
        context: Callable[..., torch.Tensor],
        through: Callable[..., torch.Tensor],
        ends: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._config, self._kernels, self._longest = config, recording.kernels, recording.longest
        self._rotary, self._context, self._through, self._ends = rotary, context, through, ends
        self._graphs = StepGraphs(recording.recorder, self._pass)
        self.most = 2 * config.block_size

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
        if rows.end > self._longest:
            self._longest = self._graphs.kind = 2 * rows.end
        parts = list[torch.Tensor]()
        for own in features:
            text = torch.cat((own.to(embedded), embedded.new_ones(len(own), 1)), -1)
            parts += [text, text.new_zeros(self._config.block_size, text.shape[1])]
        hidden = torch.cat((embedded, torch.cat(parts)), -1)
        cos_sin = self._rotary.cos_sin(rows, embedded)
        outcome = self._graphs.run(hidden, rows, 0, self._config.layers, {LOGITS}, cos_sin)
        return None if outcome is None else (outcome[0], outcome[1][LOGITS])

    def _pass(
        self, hidden: torch.Tensor, rows: StepInputs, first: int, last: int, taps: Collection[int], cos_sin: CosSin
    ) -> Outcome:
        kernels, config, where = self._kernels, self._config, rows.where()
        embedded, features, is_text = hidden.tensor_split([config.width, hidden.shape[1] - 1], -1)
        context, seen = self._context(features, self._norm), _all_seen(where)
        segments, shape = kernels.segments_of(self._longest), (config.heads, config.key_heads, config.head_dim)

        def attended(place: int, layer: LayerStep, inputs: torch.Tensor) -> torch.Tensor:
            heads = layer.heads(torch.where(is_text > 0, context, inputs)).contiguous()
            query = kernels.turn_and_store(heads, *cos_sin, layer.head_norms, where, place, shape)
            scale = config.head_dim**-0.5
            return layer.projected(kernels.step_attention(query, seen, place, config.key_heads, None, scale, segments))

        states, logits = self._ends(self._through(embedded, attended, self._norm), self._norm)
        return states, {LOGITS: logits}

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed: torch.Tensor = self._kernels.add_norm(hidden.contiguous(), None, weight, eps)[1]
        return normed


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
