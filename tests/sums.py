"""Products whose sums run in a written order: what rounding is, the same on every machine.

torch's order depends on the processor, so a bound that follows from torch's own error is another one on each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["InOrder", "rounding_of", "summed"]


def summed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[..., T, in] times [..., out, in] transposed, in float32 from the first input to the last, as native products."""
    left, right = rows.float(), weight.float()
    total = left[..., :1] * right[..., 0][..., None, :]
    for at in range(1, left.shape[-1]):
        total += left[..., at : at + 1] * right[..., at][..., None, :]
    return total


def rounding_of(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, expected: torch.Tensor) -> float:
    """How far from what is ``expected`` a product in the bias's dtype may be: in float32 little further than such sums.

    In bfloat16 the result's own rounding is more than its sum's; three of them, as a residual may be added.
    """
    off = float(((summed(rows, weight) + bias.float()).to(bias.dtype).double() - expected).abs().max())
    return (1.25 if bias.dtype is torch.float32 else 3) * off


class InOrder(TorchFunctionMode):
    """While inside, torch's linears and matrix products are so ``summed``, and rounded to their dtype at the end."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if function is F.linear:
            return _linear(*given, **(named or {}))
        if function in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            return summed(given[0], given[1].mT).to(given[0].dtype)
        return function(*given, **(named or {}))


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    total = summed(rows.reshape(-1, rows.shape[-1]), weight)
    return (total if bias is None else total + bias).view(*rows.shape[:-1], -1).to(rows.dtype)
