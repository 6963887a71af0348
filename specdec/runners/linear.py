"""Linear kernels: a weight in the layout that its kernel reads.

:class:`DenseLinear` keeps a weight as transformers stores it. :class:`PackedWeight` keeps it in the panels that
``specdec/native/layers.c`` streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from specdec.errors import shown
from specdec.native.library import library
from specdec.native.types import CODE_BYTES, CODES, PAIR, PANEL, STEP, CProduct, Kind, place_of
from specdec.runners.memory_pages import HugePages
from specdec.step.torch_switches import HOST

__all__ = [
    "DenseLinear",
    "HeadOf",
    "LinearKernel",
    "PackedWeight",
    "Tokens",
    "kernel_for",
    "linear_kernel",
    "why_not_packed",
]

Tokens = Sequence[int] | npt.NDArray[np.int64]


_PAGES = HugePages()
_FEW_ODD = 512  # at most one of so many weights may lack a code; each costs as much as about twenty that have one


class LinearKernel(Protocol):
    """A kernel for ``rows`` [T, in] times a weight [out, in], T >= 1."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, out] the product plus the bias."""

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[T, out] ``residual`` plus the product, as a new tensor."""


def why_not_packed(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no weight is packed for a computation in this dtype on this device; None where it is."""
    if device.type != "cpu":
        return f"native products run on a CPU, and the model is on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"native products compute in float32 and bfloat16, and the model in {str(dtype)[6:]}"
    found = library() is not None
    return None if found else "native products need a C compiler (cc, gcc or clang), and none works here"


def kernel_for(dtype: torch.dtype, device: torch.device) -> type[DenseLinear] | type[PackedWeight]:
    """What holds the weights of a computation in this dtype on this device."""
    return PackedWeight if why_not_packed(dtype, device) is None else DenseLinear


def linear_kernel(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseLinear | PackedWeight:
    """The fastest kernel on this machine for a weight [out, in] and a bias [out]; it has its own layout."""
    return PackedWeight(weight, bias) if PackedWeight.takes(weight) else DenseLinear(weight, bias)


class DenseLinear:
    """A weight [out, in], stored unchanged."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._transposed = weight.t()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = torch.addmm(residual, rows, self._transposed)
        return total if self.bias is None else total.add_(self.bias)


class PackedWeight:
    """A weight in panels of 32 outputs, input by input; in bfloat16 or float16 where these hold it exactly.

    A bfloat16's high byte, which is its sign and most of its exponent, takes one of 16 values in nearly all weights
    (Zhang et al. 2025, DFloat11, arXiv 2504.11651, use Huffman codes for it on GPUs). So where the library reads such
    codes, four bits stand for it: a quarter less to read, and the same numbers. Weights without a code are kept apart.

    Rows and results have the weight's dtype. Sums run in float32; a row's order of sums never depends on other rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.dtype = weight.dtype
        self.outputs, self.inputs = weight.shape
        self.bias = None if bias is None else bias.detach().clone()
        self._full_bias = None if self.bias is None else self.bias.float().contiguous()
        self._library = library()
        stored = weight.detach()
        kind = Kind.FULL if stored.dtype is torch.float32 else Kind.HALF
        if kind is Kind.FULL and _fits(stored, torch.bfloat16):
            kind, stored = Kind.HALF, stored.to(torch.bfloat16)
        elif kind is Kind.FULL and _fits(stored, torch.float16):
            kind, stored = Kind.FLOAT16, stored.to(torch.float16)
        elif kind is Kind.HALF and self._library.specdec_pairs() and self.inputs % 2 == 0:
            kind = Kind.PAIRS
        address = None if self._full_bias is None else self._full_bias.data_ptr()
        self.described = CProduct(bias=address, inputs=self.inputs, outputs=self.outputs, kind=kind)
        self._held = self._code(stored.contiguous()) or self._lay(stored)
        by_two = self.described.kind in (Kind.PAIRS, Kind.CODED, Kind.CODED_PAIRS)
        self.described.tiles = by_two and self.inputs % STEP == 0 and self._library.specdec_tiles()

    def _lay(self, stored: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The uncoded weight, in panels."""
        missing = -self.outputs % PAIR
        if missing:
            stored = F.pad(stored, (0, 0, 0, missing))
        side = 2 if self.described.kind == Kind.PAIRS else 1  # inputs that are stored side by side
        stored = stored.view(-1, PANEL, self.inputs // side, side).transpose(1, 2)
        panels = _PAGES.take(stored.nbytes).view(stored.dtype).view(stored.shape).copy_(stored)
        self.described.weight = panels.data_ptr()  # [O / 32, I, 32, 1], or [O / 32, I / 2, 32, 2]
        return (panels,)

    def _code(self, stored: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """The weight in codes, and the weights without a code; None where it is not to be stored so."""
        if self.described.kind in (Kind.FULL, Kind.FLOAT16) or self.inputs % 2 or not self._library.specdec_codes():
            return None
        found = torch.zeros(256, dtype=torch.int64, device=HOST)
        self._library.specdec_count_highs(stored.data_ptr(), stored.numel(), found.data_ptr())
        found[0] = stored.numel()  # zero always has a code: weights without one are stored as zero
        highs = found.argsort(descending=True, stable=True)[:CODES]
        odd = int(found[1:].sum() - found[highs[1:]].sum())
        if odd * _FEW_ODD > stored.numel():
            return None
        highs = highs.to(torch.uint8)
        panels = -(-self.outputs // PAIR) * PAIR // PANEL
        coded = _PAGES.take(panels * self.inputs // 2 * CODE_BYTES)
        others = torch.empty(odd, 3, dtype=torch.int32, device=HOST)
        ends = torch.empty(panels, dtype=torch.int64, device=HOST)
        described, made = self.described, (coded.data_ptr(), others.data_ptr(), ends.data_ptr())
        described.highs = highs.data_ptr()
        self._library.specdec_code(byref(described), stored.data_ptr(), *made)
        described.weight, described.odd, described.odd_end = made
        described.kind = Kind.CODED if described.kind == Kind.HALF else Kind.CODED_PAIRS
        return coded, highs, others, ends

    @staticmethod
    def takes(weight: torch.Tensor) -> bool:
        """Whether the native library is available and computes with this weight."""
        return why_not_packed(weight.dtype, weight.device) is None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._onto(rows, None)

    def add(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._onto(rows, residual.to(self.dtype).contiguous())

    def _onto(self, rows: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self._multiplied(self.described, rows, residual)

    def _multiplied(self, product: CProduct, rows: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        rows, count = rows.to(self.dtype).contiguous(), rows.shape[0]
        total = torch.empty(count, product.outputs, dtype=self.dtype, device=HOST)
        self._library.specdec_product(
            byref(product),
            rows.data_ptr(),
            None if residual is None else residual.data_ptr(),
            total.data_ptr(),
            count,
            self.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )
        return total

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.nbytes for part in self._held)

    def unpack(self) -> torch.Tensor:
        """[out, in] the weight that was packed, exactly."""
        return self.look_up(range(self.outputs))

    def look_up(self, tokens: Tokens) -> torch.Tensor:
        """[T, in] the weight's rows with these indices."""
        count, half = len(tokens), self.dtype is torch.bfloat16
        rows = torch.empty(count, self.inputs, dtype=self.dtype, device=HOST)
        numbers = np.array(tokens, dtype=np.int64)
        if self._library.specdec_look_up(byref(self.described), place_of(numbers), count, rows.data_ptr(), half):
            raise IndexError(f"no row for one of {shown(list(tokens))}; the weight has {self.outputs}")
        return rows


@dataclass(frozen=True, slots=True)
class HeadOf:
    """The head for some tokens, with the model's steps after it, if any: [..., D] to [..., d]."""

    kernel: LinearKernel
    after: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.kernel(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
        return found if self.after is None else self.after(found)

    @property
    def packed(self) -> PackedWeight | None:
        """The packed weight, where the model has no steps after it; else None."""
        return self.kernel if isinstance(self.kernel, PackedWeight) and self.after is None else None


def _fits(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds every value of a float32 weight; the check goes slice by slice to avoid a copy."""
    return all(torch.equal(part, part.to(dtype).float()) for part in torch.split(weight, 256))
