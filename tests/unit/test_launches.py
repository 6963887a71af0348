"""How many kernels a plain step launches on a CUDA device, counted on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import Engine, SamplingParams, TransformersTarget, attention, copies
from specdec.runners import plan
from tests.models import new_model, prompt_of

FREE = ("empty", "_unsafe_view", "alias", "lift_fresh", "detach", "is_pinned")  # no kernel, whatever the tensor's size


class Launches(TorchDispatchMode):
    """Counts operations but views; what a stand-in for a kernel does inside is that kernel's, and one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not (func.is_view or name.startswith(FREE)):
            # addmm copies its first argument where the result is another tensor, and a bias is part of the product.
            self.names += [name] * (2 if name == "addmm" and args[0].ndim == 2 else 1)
        return func(*args, **(kwargs or {}))

    def one(self, name: str, compute: Any) -> Any:
        """A stand-in for a kernel."""

        def launch(*arguments: Any, **options: Any) -> Any:
            known = len(self.names)
            result = compute(*arguments, **options)
            self.names[known:] = [name]
            return result

        return launch


def normed(residual: Any, delta: Any, weight: Any, epsilon: float) -> Any:
    total = residual if delta is None else residual + delta
    return total, torch.nn.functional.rms_norm(total, weight.shape, weight, epsilon)


def stored(
    heads: Any, cos: Any, sin: Any, places: Any, norms: Any, keys: Any, values: Any, first: int, count: int
) -> Any:
    rows, size = len(heads), keys.shape[3]
    query, own, value = heads.view(1, rows, -1, size).transpose(1, 2).split((count, keys.shape[1], keys.shape[1]), 1)
    keys[:, :, first : first + rows], values[:, :, first : first + rows] = own, value
    return query


@pytest.mark.parametrize("sampling", [None, SamplingParams(temperature=0.8, seed=1)])
def test_a_plain_step_of_32_layers_launches_at_most_300_kernels(
    sampling: SamplingParams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = Launches()
    kernels = SimpleNamespace(
        add_norm=mode.one("add_norm", normed),
        turn_and_store=mode.one("turn_and_store", stored),
        gate=mode.one("gate", lambda both: torch.nn.functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]),
    )
    model = new_model("llama", torch.float32, num_hidden_layers=32)
    with monkeypatch.context() as patch:
        patch.setattr(TransformersTarget, "_differs", lambda *_: None)  # the stand-ins turn nothing
        patch.setattr(plan.RunnerMaker, "_kernels", lambda maker: kernels)
        target = TransformersTarget(model, execution="fused", owned=True)
    target.backend = "aten"
    monkeypatch.setattr(attention, "_flash_takes", lambda *shape: True)

    def flash(query: Any, keys: Any, values: Any, scale: float, **_: Any) -> Any:
        return attention._plain(query, keys, values, scale)

    monkeypatch.setitem(attention._FLASH, "aten", mode.one("flash", flash))
    monkeypatch.setattr(copies, "is_apart", lambda device: True)
    decoding = Engine(target).start(prompt_of(9), 10, sampling)
    with target.active():
        decoding.prefill()
        decoding.step()
        mode.names.clear()
        with mode:
            decoding.step()
    counted = {name: mode.names.count(name) for name in sorted(set(mode.names))}
    assert counted["flash"] == 32, counted
    assert counted["add_norm"] == 64
    limit = 300 if sampling is None else 330  # the noise is some twenty operations, on one row of the vocabulary each
    assert len(mode.names) <= limit, counted
