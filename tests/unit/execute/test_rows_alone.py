"""Layers in torch on a CPU: a row's logits are the same bits beside any other rows, by the library's products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec import Draft
from specdec.execute import activations, mlp
from specdec.execute.torch import TorchExecutor
from specdec.native.library import library
from tests import models, seam
from tests.decoders import ALL, BIASED, Decoder, checkpoint_of, new_model
from tests.tiers import each_once

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

TEXT, BEGUN = models.prompt_of(70), 9


def decoder(family: str, dtype: torch.dtype, **changes: Any) -> Decoder:
    """Of heads that the library attends with."""
    return Decoder(checkpoint_of(new_model(family, dtype, **{"hidden_size": 64, **changes})), dtype)


def logits(own: Decoder, counts: Sequence[int]) -> torch.Tensor:
    """[N, V] of the text, in forwards of these numbers of rows."""
    text, found, at = seam.text(own, rows=128).fill(TEXT[:BEGUN], 4), [], BEGUN
    for count in counts:
        output = text.run(TEXT[at : at + count]).logits
        assert output is not None
        found.append(output)
        text.commit(range(count))
        at += count
    return torch.cat(found)


@pytest.mark.parametrize(("family", "dtype", "changed"), each_once(ALL, [torch.bfloat16, torch.float32], [False, True]))
def test_a_row_is_the_same_beside_others(family: str, dtype: torch.dtype, changed: bool) -> None:
    """Widths that fill no vector among them; chains, a tree, and texts beside each other."""
    own = decoder(family, dtype, **(BIASED[family] if changed else {}))
    with own.active():
        alone = logits(own, [1] * 61)
        for counts in ([61], [7] * 8 + [5], [33, 28]):
            assert torch.equal(logits(own, counts), alone)
        text, other = (seam.text(own, rows=16).fill(TEXT[:BEGUN], size) for size in (4, 9))
        chain = TEXT[BEGUN : BEGUN + 5]
        tree = Draft((*chain[:2], 3, *chain[2:]), (-1, 0, 0, 1, 3, 4))  # the chain, and a row that is not of it
        found = seam.run_together([other, text], [Draft.chain(chain[:2]), tree]).logits
        assert torch.equal(found[:2], alone[:2])
        assert torch.equal(found[[2, 3, 5, 6, 7]], alone[:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_so_where_threads_share_the_values_of_a_row(dtype: torch.dtype) -> None:
    """Torch gives each thread a part of 32,768 values and more, which may end within a row."""
    own, before = decoder("llama", dtype, hidden_size=192, intermediate_size=1000), torch.get_num_threads()
    with own.active():
        alone = logits(own, [1] * 61)
        try:
            torch.set_num_threads(3)
            assert torch.equal(logits(own, [61]), alone)
        finally:
            torch.set_num_threads(before)


def test_what_varies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does is measured when a model is loaded, of a layer of each kind."""
    executor = decoder("qwen2_moe", torch.bfloat16).executor
    assert isinstance(executor, TorchExecutor)
    assert executor.varies is None
    narrow = decoder("llama", torch.float32, hidden_size=32).executor
    assert str(narrow.varies).startswith("torch's attention, which computes heads of 8, sums")
    exact = decoder("llama", torch.float64).executor
    assert str(exact.varies).startswith("torch's products and attention")
    executor.measure_rows()
    assert executor.varies is None
    silu = {"silu": lambda values: activations.ACTIVATIONS["silu"](values) * (1 + 2**-6 * (len(values) > 1))}
    monkeypatch.setattr(mlp, "ACTIVATIONS", silu)
    executor.measure_rows()
    assert str(executor.varies).startswith("a layer rounds a row otherwise in a block of 17 rows")


@pytest.mark.parametrize("name", [*activations.ACTIVATIONS, "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_activations_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    """And of each row alone, whatever the width; ends of the range among the values."""
    act = {**activations.ACTIVATIONS, "sigmoid": activations.sigmoid}[name]
    values = torch.cat((torch.randn(29, 1000) * 4, torch.linspace(-120, 120, 1000)[None])).to(dtype)
    wide = torch.cat((values, values), 1)[:, :1000]  # rows that do not lie beside each other
    exact = values.double()
    expected = {
        "silu": torch.nn.functional.silu(exact),
        "gelu": torch.nn.functional.gelu(exact),
        "gelu_tanh": torch.nn.functional.gelu(exact, approximate="tanh"),
        "relu": torch.relu(exact),
        "sigmoid": torch.sigmoid(exact),
    }[name]
    found = act(values)
    assert found.dtype is dtype
    once = 0.51 if dtype is torch.bfloat16 else 4  # half a unit in the last place
    torch.testing.assert_close(found.double(), expected, rtol=once * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(act(wide), found)
    assert torch.equal(torch.cat([act(row[None]) for row in values]), found)
    with torch.enable_grad():
        learned = values.clone().requires_grad_()
        act(learned).sum().backward()
    assert learned.grad is not None
    assert learned.grad.isfinite().all()
