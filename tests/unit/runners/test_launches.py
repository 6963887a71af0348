"""How many kernels a plain step launches on a CUDA device, counted on a CPU."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import Engine, SamplingParams
from specdec.runners import attention, attention_kernels
from specdec.step import device_copies
from tests import seam
from tests.launching import Kernels, fused, launch
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


SAMPLED = SamplingParams(temperature=0.8, seed=1)


# The noise is some twenty operations, on one row of the vocabulary each. A graph is one launch, and six serve it.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("attention_name", "sampling", "limit"),
    [("flash", None, 300), ("flash", SAMPLED, 330), ("auto", None, 6), ("auto", SAMPLED, 6)],
)
def test_a_plain_step_of_32_layers_launches_at_most_300_kernels(
    attention_name: str, sampling: SamplingParams | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, torch_s = Launches(), Kernels()
    names = ("look_up", "add_norm", "turn_and_store", "gate", "step_attention", "paths", "pick", "walk")
    kernels = SimpleNamespace(**{name: mode.one(name, getattr(torch_s, name)) for name in names})
    kernels.segments_of = torch_s.segments_of
    recorder = launch(monkeypatch, kernels)
    monkeypatch.setattr(device_copies, "address", torch_s.address)
    record = recorder.record

    def one(work: Any) -> Any:
        outcome, replay = record(work)
        return outcome, mode.one("graph", replay)

    monkeypatch.setattr(recorder, "record", one)
    target = fused(new_model("llama", torch.float32, num_hidden_layers=32), attention=attention_name)
    monkeypatch.setattr(attention, "_flash_takes", lambda *shape: True)

    def flash(query: Any, keys: Any, values: Any, scale: float, **_: Any) -> Any:
        return attention_kernels.plain_attention(query, keys, values, scale)

    monkeypatch.setitem(attention_kernels.FLASH, "flash", mode.one("flash", flash))
    decoding = Engine(target).start(prompt_of(9), 10, sampling)
    with target.active():
        decoding.prefill()
        decoding.step()
        mode.names.clear()
        with mode:
            decoding.step()
    counted = {name: mode.names.count(name) for name in sorted(set(mode.names))}
    if attention_name == "auto":
        assert counted["graph"] == 1, counted
    else:
        assert (counted["flash"], counted["add_norm"]) == (32, 65), counted
    assert len(mode.names) <= limit, counted


def test_a_half_precision_step_is_nine_kernels_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where it is recorded: sums with norms, products, turns, and attention, whose one call is two kernels."""
    mode, torch_s = Launches(), Kernels()
    names = ("look_up", "add_norm", "turn_and_store", "product", "step_attention", "paths", "pick", "walk")
    kernels = SimpleNamespace(**{name: mode.one(name, getattr(torch_s, name)) for name in names})
    kernels.segments_of = torch_s.segments_of
    recorder = launch(monkeypatch, kernels)
    monkeypatch.setattr(device_copies, "address", torch_s.address)
    record, counted = recorder.record, Counter[str]()

    def one(work: Any) -> Any:
        mode.names.clear()
        with mode:
            work()
        counted.update(mode.names)
        return record(work)

    monkeypatch.setattr(recorder, "record", one)
    target = fused(new_model("llama", torch.float16, num_hidden_layers=32))
    assert target.batch_invariant
    counted.clear()
    with target.active():
        seam.text(target, capacity=9, rows=4).run([1, 2])
    layers = {"add_norm": 65, "product": 128, "turn_and_store": 32, "step_attention": 32, "paths": 1}
    ends = {"look_up": 1, "add_norm": 1, "product": 1, "pick": 1, "walk": 1}
    assert counted == Counter(layers) + Counter(ends)
