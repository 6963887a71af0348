"""A decoder layer on a CUDA device, in nine launches of Triton kernels.

In half precision a row's results do not depend on the other rows (:mod:`specdec.runners.kernels.product`,
:mod:`specdec.runners.kernels.step`), in a step or a prompt, recorded or launched, of one sequence or several. In full
precision, and with attention chosen by name, products are cuBLAS's, whose order of summation depends on the number of
rows. A layer returns the residual stream and the term to be added to it, so that the sum is computed together with the
next norm.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from specdec.decoder.spec import Attention, Layer
from specdec.execute.layer import GatedWeights, LayerWeights
from specdec.runners.attention import attend
from specdec.runners.cuts import ChosenCuts, Weight, weight_of
from specdec.runners.graphs import CosSin, StepInputs
from specdec.runners.linear import DenseLinear
from specdec.runners.rows import TextRows
from specdec.runners.sent_rows import Group, SentRows, SentText

__all__ = ["CudaLayer", "Together", "head_norms", "why_varying"]

_HALF = (torch.float16, torch.bfloat16)
_GATE_UP = 2  # place of the product that is of two, among a layer's


def head_norms(own: Attention, weights: LayerWeights) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Weights [d] of the norms of queries and of keys, which are of each head the same, and their epsilon."""
    if weights.heads is None or own.qk_norm is None:
        return None
    query, key = (weights.heads[place, 0].clone() for place in (0, own.heads))
    return query, key, own.qk_norm.eps


def why_varying(weight: torch.Tensor) -> str | None:
    """Why the kernel of products does not support a weight, so that results depend on the rows; None if it does."""
    if weight.dtype not in _HALF:
        return f"in {str(weight.dtype).removeprefix('torch.')} products are cuBLAS's"
    return None


class Together:
    """A batch whose attention takes one launch for all sequences of a group, in the place of one for each.

    Attributes:
        groups: each with the places in ``cos_sin`` of its rows.
        order: see :meth:`specdec.runners.sent_rows.SentRows.groups`.
    """

    def __init__(self, rows: SentRows, turns: torch.Tensor) -> None:
        self.parts, self.order = rows.groups()
        self.backend, self.end = rows.backend, rows.end
        self.groups = [(group, turns.index_select(0, group.rows)) for group in self.parts]


class CudaLayer:
    """A layer that the kernels compute (:func:`specdec.execute.cuda_kernels.why_not`).

    Args:
        own: what it computes.
        weights: by what.
        number: its place in the decoder.
        kernels: Triton's.
        cuts: how its products are cut.

    Attributes:
        takes_own: whether its products, and attention of rows that are launched, are the kernels' as well.
        products: its four, each with its shape.
        norm: weight [D] and epsilon of its first norm.
        store: key heads and their width.
    """

    def __init__(self, own: Layer, weights: LayerWeights, number: int, kernels: ModuleType, cuts: ChosenCuts) -> None:
        attention, mlp = own.attention, weights.mlp
        assert isinstance(mlp, GatedWeights)
        self._number, self._scale = number, attention.scale
        self._shape = attention.heads, attention.kv_heads, attention.head_dim
        linears: list[Any] = [weights.qkv, weights.out, mlp.gate_up, mlp.down]
        self.products: list[tuple[Weight, DenseLinear]] = [
            (weight_of(linear.weight, gated=number == _GATE_UP), linear) for number, linear in enumerate(linears)
        ]
        before: Any = weights.before
        self._norms = [(norm.by, norm.norm.eps) for norm in before]
        self._head_norms = head_norms(attention, weights)
        self.norm, self.store = self._norms[0], self._shape[1:]
        self._kernels, self._cuts, self.takes_own = kernels, cuts, False

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        rows: SentRows | StepInputs | Together,
        cos_sin: CosSin,
        segments: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual [T, D] and the term to be added to it, from before the layer to after it.

        ``cos_sin``: cosines and sines [positions, d], and each row's place in them; ``segments``: most of a text.
        """
        kernels, (qkv, out, gate_up, down) = self._kernels, self.products
        residual, normed = kernels.add_norm(residual, delta, *self._norms[0])
        mixed = self._mixed(self._product(normed, *qkv), rows, cos_sin, segments)
        residual, normed = kernels.add_norm(residual, self._product(mixed, *out), *self._norms[1])
        gated = self._product(normed, *gate_up)
        return residual, self._product(gated if self.takes_own else kernels.gate(gated), *down)

    def _product(self, rows: torch.Tensor, weight: Weight, linear: DenseLinear) -> torch.Tensor:
        """The product; of gate and up, where it is the kernels' own, gated."""
        if not self.takes_own:
            return F.linear(rows, linear.weight, linear.bias)
        cuts = self._cuts.of(weight)
        product: torch.Tensor = self._kernels.product(rows, linear.weight, linear.bias, gated=weight[-1], cuts=cuts)
        return product

    def _mixed(
        self,
        heads: torch.Tensor,
        rows: SentRows | StepInputs | Together,
        cos_sin: CosSin,
        segments: int,
    ) -> torch.Tensor:
        """Rows [T, heads x d] of all sequences to what they attend to, [T, query heads x d]."""
        cos, sin, at = cos_sin
        if isinstance(rows, Together):
            parts = [
                self._attend(heads.index_select(-2, group.rows), group, (cos, sin, turns), segments)
                for group, turns in rows.groups
            ]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).index_select(0, rows.order)
        parts = [  # each sequence's rows are stored in its own cache by a launch of their own
            self._attend(
                heads[..., part.begins : part.ends, :], part, (cos, sin, at[part.begins : part.ends]), segments
            )
            for part in rows.parts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(
        self, heads: torch.Tensor, rows: SentText | Group | StepInputs, cos_sin: CosSin, segments: int
    ) -> torch.Tensor:
        """The same of one sequence or a group."""
        number, where = self._number, rows.where()
        query = self._kernels.turn_and_store(heads.contiguous(), *cos_sin, self._head_norms, where, number, self._shape)
        if self.takes_own or isinstance(rows, StepInputs):
            window = rows.cache.group_of[number].window if isinstance(rows, SentText) else rows.windows[number]
            mixed: torch.Tensor = self._kernels.step_attention(
                query, where, number, self._shape[1], window, self._scale, segments
            )
            return mixed
        assert isinstance(rows, TextRows)
        return attend(query, rows, number, self._scale).transpose(1, 2).reshape(rows.rows, -1)
