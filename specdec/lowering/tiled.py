"""Tiled products: the layout that ``specdec/native/layers.c`` streams, and a product of its own."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
import torch.nn.functional as F

from specdec.lowering.parts import Site, replace
from specdec.native.library import PAIR, PANEL, CProduct, Kind, library

__all__ = ["Tiled", "tiles"]


def tiles(weight: torch.Tensor) -> bool:
    """Whether the native library is there and computes with this weight."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and library() is not None


class Tiled:
    """The weight in panels of 32 outputs, input by input; in bfloat16 wherever that holds it exactly.

    Rows and results have the weight's dtype; sums run in float32, one row's in the same order whatever the others.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bias, self.dtype = bias, weight.dtype
        self.outputs, self.inputs = weight.shape
        stored = weight.detach()
        kind = Kind.FULL if stored.dtype is torch.float32 else Kind.HALF
        if kind is Kind.FULL and _is_half(stored):
            kind, stored = Kind.HALF, stored.to(torch.bfloat16)
        elif kind is Kind.HALF and library().specdec_pairs() and self.inputs % 2 == 0:
            kind = Kind.PAIRS
        missing = -self.outputs % PAIR
        if missing:
            stored = F.pad(stored, (0, 0, 0, missing))
        self._side = 2 if kind is Kind.PAIRS else 1  # inputs that lie side by side
        panels = stored.view(-1, PANEL, self.inputs // self._side, self._side)
        self._panels = panels.transpose(1, 2).contiguous()  # [O / 32, I, 32, 1], or [O / 32, I / 2, 32, 2]
        self._bias = None if bias is None else bias.float().contiguous()
        address = None if self._bias is None else self._bias.data_ptr()
        self.described = CProduct(self._panels.data_ptr(), address, self.inputs, self.outputs, kind)
        self._multiply = library().specdec_product

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._onto(rows, torch.zeros(rows.shape[0], self._panels.shape[0] * PANEL))

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(rows.shape[0], self._panels.shape[0] * PANEL)
        total[:, : self.outputs] = residual
        return self._onto(rows, total)

    def _onto(self, rows: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """``total`` [T, padded outputs] plus the product; in place, and cut to size."""
        rows = rows.to(torch.float32, copy=True).contiguous()  # a copy: the kernel may use it up
        self._multiply(byref(self.described), rows.data_ptr(), total.data_ptr(), rows.shape[0], torch.get_num_threads())
        return total[:, : self.outputs].to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._panels.nbytes)

    def install(self, sites: Sequence[Site]) -> None:
        replace(sites, self)

    def unpack(self) -> torch.Tensor:
        """[out, in] the very weight that was tiled."""
        return self._panels.transpose(1, 2).reshape(-1, self.inputs)[: self.outputs].to(self.dtype)

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., in] rows of the weight, by their numbers."""
        return self._panels[tokens // PANEL, :, tokens % PANEL].flatten(tokens.ndim).to(self.dtype)


def _is_half(weight: torch.Tensor) -> bool:
    """Whether bfloat16 holds every value of a float32 weight; looked at in slices, to need no copy of it."""
    return all(torch.equal(part, part.to(torch.bfloat16).float()) for part in torch.split(weight, 256))
