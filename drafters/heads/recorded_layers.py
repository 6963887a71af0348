"""A head's layers in a recorded pass, by the kernels of the target's own steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drafters.heads.forward import HeadForward
from specdec.decoder.rope import RopeTables
from specdec.execute.cuda_layer import head_norms
from specdec.execute.cuda_rope import PlacedTables
from specdec.execute.norm import RmsNorm
from specdec.runners.graphs import CosSin
from specdec.runners.recording import Recording
from specdec.runners.rows import Rows

__all__ = ["RecordedLayers"]


class RecordedLayers:
    """Layers whose norms and attention the kernels compute.

    Args:
        forward: the head.
        recording: of the target's runner.
        ropes: the head's rotary positions.

    Attributes:
        forward: the head, with the kernels' norms.
        kernels: they.
        longest: most tokens of a text that they attend to.
    """

    def __init__(self, forward: HeadForward, recording: Recording, ropes: RopeTables) -> None:
        self.kernels, self.longest = recording.kernels, recording.longest
        self.forward, layers = forward.normed_by(self._normed), forward.spec.layers
        self._head_norms = [head_norms(own.attention, by) for own, by in zip(layers, self.forward.layers, strict=True)]
        self._ropes, self._rope = ropes, layers[0].attention.rope
        self._tables: PlacedTables | None = None

    def cos_sin(self, rows: Rows, device: torch.device) -> CosSin:
        """Cosines and sines [positions, d], and int64 [T] where in them the rows are: nothing is gathered."""
        if self._tables is None:
            self._tables = PlacedTables(self._ropes, self._rope, device)
        return *self._tables.reach(rows.end), rows.positions[0].to(device)

    def attend(
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
            cos_sin: see :meth:`cos_sin`.
            where: the arrays of a step (:mod:`specdec.runners.packed_step`), by which rows are stored.
            seen: the same, by which they are attended to.
            window: of the layer.
        """
        own, product = self.forward.spec.layers[place].attention, self.forward.layers[place].qkv
        assert product is not None
        shape, segments = (own.heads, own.kv_heads, own.head_dim), self.kernels.segments_of(self.longest)
        heads, norms = product(reads).contiguous(), self._head_norms[place]
        query = self.kernels.turn_and_store(heads, *cos_sin, norms, where, place, shape)
        mixed: torch.Tensor = self.kernels.step_attention(query, seen, place, own.kv_heads, window, own.scale, segments)
        return mixed

    def _normed(self, norm: RmsNorm, hidden: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.kernels.add_norm(hidden, None, norm.by, norm.norm.eps)[1]
        return normed
