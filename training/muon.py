"""Muon (Jordan et al. 2024), whose products take the dtype that the device is fast in.

``torch.optim.Muon`` orthogonalises in bfloat16 on any device; a CPU without bfloat16 instructions takes 25 times as
long for that as in float32. Matrices of one shape share their products here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["Muon", "orthogonal"]

_STEPS, _EPS = 5, 1e-7
_A, _B, _C = 3.4445, -4.775, 2.0315  # the authors' quintic, steepest at zero
_LIKE_ADAMW = 0.2  # root mean square of AdamW's usual update


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum, and updates of the size of AdamW's; its state is that of ``torch.optim.Muon``.

    Args:
        params: matrices.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: momentum.
        dtype: dtype of the products.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    update = self._moved(matrix, group["momentum"])
                    alike[tuple(sorted(matrix.shape))].append((matrix, update))
            for pairs in alike.values():
                wide = torch.stack([u if u.shape[0] <= u.shape[1] else u.T for _, u in pairs])
                for (matrix, update), found in zip(pairs, orthogonal(wide, self.dtype), strict=True):
                    own = found if update.shape == found.shape else found.T
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(own, alpha=-group["lr"] * _LIKE_ADAMW * max(matrix.shape) ** 0.5)
        return loss

    def _moved(self, matrix: torch.Tensor, momentum: float) -> torch.Tensor:
        """[m, n] the gradient with its momentum."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        buffer: torch.Tensor = state["momentum_buffer"]
        buffer.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(buffer, momentum)


def orthogonal(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[N, m, n] matrices, m <= n, with singular values near 1, by Newton-Schulz iterations in ``dtype``."""
    found = wide.to(dtype)
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), found, beta=_A)
    return found.to(wide.dtype)
