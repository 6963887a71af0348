"""Products: one weight, stored the way that its kernel reads it fastest.

``linear``
    [out, in] as transformers stores it. The model's own parameters are views of it.
``transposed``
    [in, out]: one row then streams through the matrix in order.
``packed``
    In oneDNN's blocked layout, which only oneDNN reads.
``tiled``
    In panels that our own kernel streams (:mod:`specdec.lowering.tiled`).

Where the layout is another, the model's linears become :class:`~specdec.lowering.parts.Part`: they bring their rows
into order again when they are called, saved or copied, so the model itself stays right; with packed or tiled weights it
is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from specdec.lowering.pages import forget
from specdec.lowering.parts import Site, replace
from specdec.lowering.tiled import Tiled, tiles

__all__ = ["PRODUCTS", "Packed", "Product", "fuse", "usable"]


class Product(Protocol):
    """``rows`` [T, in] times a weight, T >= 1."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, out], the bias added."""

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual`` [T, out] plus the product, in a new tensor."""

    def install(self, sites: Sequence[Site]) -> None:
        """Make the model's linears read this product's storage, and so free theirs."""


def fuse(sites: Sequence[Site], *, owned: bool = False) -> Linear:
    """One product for several linears of one input, stacked; their parameters become views of it.

    ``owned``: nobody else holds the weights, so their files' pages can go.
    """
    parts = [site.linear for site in sites]
    weights = [part.weight.data for part in parts]
    biases = [part.bias.data for part in parts if part.bias is not None]
    lone = len(parts) == 1
    product = Linear(weights[0] if lone else torch.cat(weights), torch.cat(biases) if biases else None)
    product.install(sites)
    if owned and not lone:
        for weight in weights:
            forget(weight)
    return product


def usable(kernel: str, weight: torch.Tensor) -> bool:
    """Whether a kernel computes with this weight on this machine."""
    if weight.device.type != "cpu":
        return kernel == "linear"
    return {"packed": _packs, "tiled": tiles}.get(kernel, lambda _: True)(weight)


def _packs(weight: torch.Tensor) -> bool:
    """Whether oneDNN has a packed kernel for this weight here."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    bf16 = weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32 or bf16


class Linear:
    """The weight as it is, [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._transposed = weight.t()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = torch.addmm(residual, rows, self._transposed)
        return total if self.bias is None else total.add_(self.bias)

    def install(self, sites: Sequence[Site]) -> None:
        start = 0
        for part in (site.linear for site in sites):
            stop = start + part.out_features
            part.weight.data = self.weight[start:stop]
            if self.bias is not None:
                part.bias.data = self.bias[start:stop]
            start = stop


class Transposed(Linear):
    """The weight's columns in a row each, [in, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight.t().contiguous().t(), bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product = torch.mm(rows, self._transposed)
        return product if self.bias is None else product.add_(self.bias)

    def install(self, sites: Sequence[Site]) -> None:
        replace(sites, self)

    def unpack(self) -> torch.Tensor:
        """[out, in] a view."""
        return self.weight


class Packed:
    """The weight in oneDNN's layout."""

    _ROWS = 8  # a hint to oneDNN, which picks the layout; any number of rows computes

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self._ROWS)
        self._plain = torch.ops.mkldnn._linear_pointwise.default
        self._added = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._plain(rows, self._weight, self.bias, "none", [], "")
        return product

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self._added(rows, residual, self._weight, self.bias, "add")
        return total

    def install(self, sites: Sequence[Site]) -> None:
        replace(sites, self)

    def unpack(self) -> torch.Tensor:
        """[out, in] the very weight that was packed."""
        weight: torch.Tensor = self._weight.to_dense()
        return weight


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Product]] = {
    "linear": Linear,
    "transposed": Transposed,
    "packed": Packed,
    "tiled": Tiled,
}
