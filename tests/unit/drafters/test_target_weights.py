"""The target's last weights, as new adapters and heads begin with them, read through its functions alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drafters.shared.target_weights import head_weight, norm_weight

SIZE = 8


@pytest.fixture
def target() -> Any:
    """A last norm and a head with biases, as Phi has them."""
    torch.manual_seed(0)
    norm, head = nn.LayerNorm(SIZE, eps=1e-12).double(), nn.Linear(SIZE, 5).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)

    def head_of(tokens: torch.Tensor) -> Any:
        return lambda states: head(states)[..., tokens]

    options = {"hidden_size": SIZE, "dtype": torch.float64, "head_device": torch.device("cpu")}
    return SimpleNamespace(norm=norm, head=head, head_of=head_of, **options)


def test_a_norms_weight_without_its_bias(target: Any) -> None:
    torch.testing.assert_close(norm_weight(target), target.norm.weight, rtol=1e-9, atol=1e-12)
    target.norm = lambda hidden: nn.functional.rms_norm(hidden, (SIZE,), torch.arange(8).double(), 1e-12)
    torch.testing.assert_close(norm_weight(target), torch.arange(8).double(), rtol=1e-9, atol=1e-12)


def test_a_heads_weight_without_its_bias(target: Any) -> None:
    torch.testing.assert_close(head_weight(target), target.head.weight, rtol=0, atol=1e-15)
    tokens = torch.tensor([1, 4])
    torch.testing.assert_close(head_weight(target, tokens), target.head.weight[tokens], rtol=0, atol=1e-15)
