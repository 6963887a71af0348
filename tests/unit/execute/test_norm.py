"""RMS norms: the lean one is torch's own."""

from __future__ import annotations

import torch

from specdec.decoder.spec import Norm
from specdec.execute.norm import RmsNorm


def test_a_norm_is_torch_s_own() -> None:
    """For rows of all sizes; one of zeros rests on epsilon alone."""
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        weight = torch.randn(48).to(dtype)
        rows = torch.randn(5, 48).to(dtype) * torch.tensor([1e-6, 1e-3, 1.0, 1e3, 0.0]).to(dtype)[:, None]
        expected = torch.nn.functional.rms_norm(rows, (48,), weight, 1e-5)
        assert (RmsNorm(Norm(1e-5), weight)(rows) - expected).abs().max() <= bound * expected.abs().max()
