"""A head's passes as CUDA graphs, which the kernels of the target's own steps compute.

A pass of a head is some forty operations beside its products. Recorded, it is one launch
(:mod:`specdec.runners.graphs`). Embeddings are looked up before it, and a graph computes logits of all its rows.

An EAGLE head has two graphs: of text rows, which read the target's hidden states, and of drafted rows. A DFlash or
DSpark head has one, of new rows of text, and behind them the rows of a block. Its rows of text have keys and values
alone, which come from the target's hidden states. They pass the layers like the block's rows all the same, and what
comes out of them is not read. So one graph does for any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from drafters.heads.config import BlockConfig
from drafters.heads.forward import HeadForward
from drafters.heads.head_step import Linear
from specdec.decoder.rope import RopeTables
from specdec.execute.cuda_layer import head_norms
from specdec.execute.cuda_rope import PlacedTables
from specdec.execute.norm import RmsNorm
from specdec.runners.graphs import LOGITS, CosSin, Outcome, StepGraphs, StepInputs
from specdec.runners.recording import Recording
from specdec.runners.rows import Rows

__all__ = ["MOST_RECORDED", "RecordedBlock", "RecordedChain"]

MOST_RECORDED = 16  # rows of a sequence; more come after rests and in prompts, and compute for longer than they launch

Pass = Callable[[torch.Tensor, StepInputs, CosSin], tuple[torch.Tensor, torch.Tensor]]
"""What rows read [B, I], their arrays, and their positions -> states for the next level [B, W], and logits [B, d]."""


class _Recorded:
    """Recorded passes of a head.

    Args:
        forward: the head.
        head: gives logits.
        recording: of the target's runner.
        ropes: the head's rotary positions.
        most: most rows of a sequence in a graph.
        passes: one for each kind of graphs.

    Attributes:
        most: as above. After rests and in prompts there are more, which are launched.
    """

    def __init__(
        self, forward: HeadForward, head: Linear, recording: Recording, ropes: RopeTables, most: int, *passes: Pass
    ) -> None:
        self.most, self._head = most, head
        self._kernels, self._longest = recording.kernels, recording.longest  # tokens of a text that are attended to
        self._forward, layers = forward.normed_by(self._normed), forward.spec.layers
        self._head_norms = [head_norms(own.attention, by) for own, by in zip(layers, self._forward.layers, strict=True)]
        self._ropes, self._rope = ropes, layers[0].attention.rope
        self._tables: PlacedTables | None = None
        self._graphs = [StepGraphs(recording.recorder, _as_layers(one)) for one in passes]

    @property
    def failed(self) -> str | None:
        """Why passes are launched operation by operation after all, or None."""
        return next((own.failed for own in self._graphs if own.failed), None)

    def _replayed(
        self, graphs: StepGraphs, rows: Rows, embedded: torch.Tensor, beside: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits [T, d] and states [T, W] of all rows; None where they are not recorded.

        ``beside``: what the rows read [T, .] beside their embeddings [T, W], in parts.
        """
        if max(rows.step.counts) > self.most or self.failed or not graphs.takes(rows):
            return None
        if rows.end > self._longest:
            self._longest = 2 * rows.end
            for own in self._graphs:
                own.kind = self._longest
        if self._tables is None:
            self._tables = PlacedTables(self._ropes, self._rope, embedded.device)
        cos_sin = *self._tables.reach(rows.end), rows.positions[0].to(embedded.device)  # nothing is gathered
        hidden = torch.cat((embedded, torch.cat([*beside()])), -1)
        outcome = graphs.run(hidden, rows, 0, len(self._forward.layers), {LOGITS}, cos_sin)
        return None if outcome is None else (outcome[1][LOGITS], outcome[0])

    def _attend(
        self,
        place: int,
        reads: torch.Tensor,
        cos_sin: CosSin,
        where: Mapping[str, torch.Tensor],
        seen: Mapping[str, torch.Tensor],
        window: int | None = None,
    ) -> torch.Tensor:
        """[T, H d] attention of a layer's rows, made of ``reads``, after their keys and values are stored.

        Args:
            place: of the layer.
            reads: [T, I].
            cos_sin: cosines and sines [positions, d], and int64 [T] where in them the rows are.
            where: the arrays of a step (:mod:`specdec.runners.packed_step`), by which rows are stored.
            seen: the same, by which they are attended to.
            window: of the layer.
        """
        own, product = self._forward.spec.layers[place].attention, self._forward.layers[place].qkv
        assert product is not None
        shape, segments = (own.heads, own.kv_heads, own.head_dim), self._kernels.segments_of(self._longest)
        heads, norms = product(reads).contiguous(), self._head_norms[place]
        query = self._kernels.turn_and_store(heads, *cos_sin, norms, where, place, shape)
        mixed: torch.Tensor = self._kernels.step_attention(
            query, seen, place, own.kv_heads, window, own.scale, segments
        )
        return mixed

    def _ends(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last, onward = self._forward.ends(hidden)
        return onward, self._head(last)

    def _normed(self, norm: RmsNorm, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._kernels.add_norm(hidden, None, norm.by, norm.norm.eps)[1]
        return normed


def _as_layers(own: Pass) -> Callable[..., Outcome]:
    """A pass as graphs record it."""

    def layers(
        hidden: torch.Tensor, rows: StepInputs, first: int, last: int, taps: Collection[int], cos_sin: CosSin
    ) -> Outcome:
        onward, logits = own(hidden, rows, cos_sin)
        return onward, {LOGITS: logits}

    return layers


class RecordedChain(_Recorded):
    """The recorded passes of an EAGLE head; see _Recorded.

    Args:
        mask: [1, taps x D] what heads that draft all depths read in the place of hidden states that are not known.
    """

    def __init__(
        self, forward: HeadForward, head: Linear, recording: Recording, ropes: RopeTables, mask: torch.Tensor | None
    ) -> None:
        super().__init__(forward, head, recording, ropes, MOST_RECORDED, self._text_rows, self._drafted_rows)
        self._mask, self._width = mask, forward.spec.width

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
        kinds, (text, drafted), mask = {features is not None for features, _ in brought}, self._graphs, self._mask
        if len(kinds) > 1:
            return None

        def beside() -> list[torch.Tensor]:
            parts = list[torch.Tensor]()
            for features, states in brought:
                if features is not None:
                    parts.append(features.to(embedded))
                if states is not None:
                    parts.append(states if features is None or mask is None else mask.expand(len(states), -1))
            return parts

        return self._replayed(text if True in kinds else drafted, rows, embedded, beside)

    def _text_rows(self, hidden: torch.Tensor, rows: StepInputs, cos_sin: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        states = self._forward.fused(hidden[:, self._width :])
        return self._pass(hidden[:, : self._width], states, rows, cos_sin)

    def _drafted_rows(
        self, hidden: torch.Tensor, rows: StepInputs, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pass(hidden[:, : self._width], hidden[:, self._width :], rows, cos_sin)

    def _pass(
        self, embedded: torch.Tensor, states: torch.Tensor, rows: StepInputs, cos_sin: CosSin
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States for the next level, and logits, of the rows' embeddings and states [B, W]."""
        where = rows.where()
        where["paths"] = self._kernels.paths(where)

        def attend(place: int, inputs: torch.Tensor) -> torch.Tensor:
            return self._attend(place, inputs, cos_sin, where, where, rows.windows[place])

        hidden, reads = self._forward.entering(embedded, states)
        return self._ends(self._forward.through(hidden, attend, reads=reads))


class RecordedBlock(_Recorded):
    """The recorded pass of a DFlash or DSpark head without convolutions and windows; see _Recorded.

    Args:
        block_size: rows of a block.
    """

    def __init__(
        self, forward: HeadForward, head: Linear, recording: Recording, ropes: RopeTables, block_size: int
    ) -> None:
        super().__init__(forward, head, recording, ropes, 2 * block_size, self._pass)
        self._size = block_size

    @classmethod
    def fits(cls, config: BlockConfig) -> bool:
        """Whether a graph can run a head: each row of a block sees all rows, and needs no others but for attention."""
        return not config.conv_kernel and all(config.window(layer) is None for layer in range(config.layers))

    def run(
        self, rows: Rows, features: Sequence[torch.Tensor], embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits [T, d], and states [T, W] behind the last norm, of all rows; None where they are not recorded.

        Args:
            rows: T rows, of each sequence its text's and its block's; keys and values are stored.
            features: per sequence, hidden states of the target [T', taps x D] for its rows of text.
            embedded: [T, W] the rows' embeddings; those of text are not read.
        """

        def beside() -> list[torch.Tensor]:
            parts = list[torch.Tensor]()
            for own in features:
                text = torch.cat((own.to(embedded), embedded.new_ones(len(own), 1)), -1)
                parts += [text, text.new_zeros(self._size, text.shape[1])]
            return parts

        return self._replayed(self._graphs[0], rows, embedded, beside)

    def _pass(self, hidden: torch.Tensor, rows: StepInputs, cos_sin: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        forward, where = self._forward, rows.where()
        embedded, features, is_text = hidden.tensor_split([forward.spec.width, hidden.shape[1] - 1], -1)
        context, seen = forward.fused(features), _all_seen(where)

        def attend(place: int, inputs: torch.Tensor) -> torch.Tensor:
            return self._attend(place, torch.where(is_text > 0, context, inputs), cos_sin, where, seen)

        return self._ends(forward.through(embedded, attend))


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
