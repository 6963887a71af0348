"""Running Medusa's heads: all heads on the states of one or several sequences, if possible in one native call.

The work around the products costs as much as they do, as a forward of the target has driven its code out of the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_void_p
from typing import NamedTuple

import torch
import torch.nn.functional as F

from drafters.medusa.heads import MedusaHeads, with_roots
from specdec.native.library import library
from specdec.native.types import CHeads, CProduct
from specdec.runners.linear import HeadOf, LinearKernel, PackedWeight, linear_kernel
from specdec.step.torch_switches import HOST
from specdec.target import Target

__all__ = ["HeadsStep", "State"]


class State(NamedTuple):
    """The input of the heads: a ``row`` of ``hidden`` [T, D], and the token that the target chose from it."""

    hidden: torch.Tensor
    row: int
    root: int


class HeadsStep:
    """The weights of some heads in the layout that drafting uses; the heads' modules are not needed afterwards.

    Args:
        heads: the heads' modules.
        count: how many of the heads to use, from the first on.
        head: the target's head, over the draft vocabulary if there is one; unused if the heads have their own.
        target: the target, which embeds the roots.
    """

    def __init__(
        self, heads: MedusaHeads, count: int, head: Callable[[torch.Tensor], torch.Tensor], target: Target
    ) -> None:
        own, weights = heads.config, {name: weight.detach() for name, weight in heads.named_parameters()}
        # Each layer has one product per head; as all heads read the same state, the first layer's are joined in one.
        self._blocks: list[list[LinearKernel]] = []
        for layer in range(own.layers):
            parts = [[weights[f"{k}.{layer}.linear.{part}"] for k in range(count)] for part in ("weight", "bias")]
            stacked = zip(*parts, strict=True) if layer else [map(torch.cat, parts)]
            self._blocks.append([linear_kernel(weight, bias) for weight, bias in stacked])
        self._embed = target.embed if own.sees_root else None
        first = weights["0.0.linear.bias"]
        self._place, self._count, self._size = (first.device, first.dtype), count, own.hidden_size
        self._matrices = [linear_kernel(weights[f"{k}.{own.layers}.weight"]) for k in range(count) if own.own_head]
        self._head = head
        self._described = self._describe()

    def _describe(self) -> CHeads | None:
        """The heads as the library reads them; None where it cannot run them."""
        blocks = [block for layer in self._blocks for block in layer]
        packed = [block for block in blocks if isinstance(block, PackedWeight)]
        shared: Sequence[object] = [self._head.packed] if isinstance(self._head, HeadOf) else []
        ends = [end for end in self._matrices or shared if isinstance(end, PackedWeight)]
        if len(packed) < len(blocks) or (self._matrices and not ends):
            return None
        self._outputs = ends[0].outputs if ends else None
        self._products = [(CProduct * len(some))(*(one.described for one in some)) for some in (packed, ends)]
        first, last = map(addressof, self._products)
        return CHeads(first, last if ends else None, len(self._blocks), self._count, self._size, bool(self._matrices))

    @property
    def native(self) -> bool:
        """Whether the compiled library runs the heads."""
        return self._described is not None

    @torch.no_grad()
    def each(self, states: Sequence[State]) -> list[torch.Tensor]:
        """[heads, d] logits of every state."""
        dtype, roots = self._place[1], [state.root for state in states]
        read = all(rows.dtype is dtype and rows.is_cpu and rows.is_contiguous() for rows, _, _ in states)
        if self._described is None or not read:
            hidden = torch.cat([rows[row : row + 1] for rows, row, _ in states])
            return [*self.logits(hidden, torch.tensor(roots)).unbind()]
        embedded = None if self._embed is None else self._embed(roots).to(*self._place).contiguous()
        row_bytes = self._size * dtype.itemsize
        places = [rows.data_ptr() + row * row_bytes for rows, row, _ in states]
        outputs = [torch.empty(self._count, self._outputs or self._size, dtype=dtype, device=HOST) for _ in states]
        many = c_void_p * len(states)
        library().specdec_guess(
            byref(self._described),
            many(*places),
            None if embedded is None else embedded.data_ptr(),
            len(states),
            many(*(one.data_ptr() for one in outputs)),
            dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return outputs if self._outputs else [*self._head(torch.stack(outputs)).unbind()]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        """[N, heads, d] logits for hidden states [N, D] and roots [N]."""
        hidden = hidden.to(*self._place)
        states = hidden[:, None]  # [N, 1, D], later [N, K, D]
        parts: Sequence[torch.Tensor] = [hidden if self._embed is None else with_roots(hidden, self._embed(roots))]
        for products in self._blocks:
            outputs = [product(own) for product, own in zip(products, parts, strict=True)]
            more = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            states = states + F.silu(more).view(len(hidden), -1, hidden.shape[-1])
            parts = states.unbind(1)
        if not self._matrices:
            return self._head(states)
        return torch.stack([head(own) for head, own in zip(self._matrices, states.unbind(1), strict=True)], 1)
