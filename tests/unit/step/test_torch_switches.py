"""Torch's switches: what a caller has set holds for the caller's own code, and not inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.errors import TargetError
from specdec.step import torch_switches
from tests.switches import SWITCHES


def state() -> list[Any]:
    """What code sees that makes tensors without saying where and as what."""
    made = [torch.empty(1), torch.tensor(0.5), torch.full((1,), 0.5), torch.arange(0.5), torch.tensor([1, 2])]
    ones = torch.ones(1, 1, device="cpu", dtype=torch.float32)
    sums = torch.nn.functional.linear(ones, ones)
    return [*((one.device.type, one.dtype) for one in made), sums.dtype, torch.is_inference_mode_enabled()]


@pytest.mark.parametrize("context", [torch_switches.steps, torch_switches.loading])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_engine_s_code_sees_torch_as_it_starts(name: str, context: Any) -> None:
    with context():
        expected = state()
    with SWITCHES[name]():
        before = state() if "dtype" not in name else None
        with context():
            assert state() == expected
            with context():
                assert state() == expected
        assert before is None or state() == before
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device() == torch.device("cpu")


def test_nothing_is_entered_where_nothing_is_set() -> None:
    """A step pays for a few questions, and for nothing else."""
    with torch_switches.steps():
        assert torch_switches.steps() is torch_switches._NOTHING
    assert torch_switches.loading() is torch_switches._NOTHING


def test_a_module_s_own_autocast_may_stay() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch_switches.steps(autocast=True):
            assert state()[5] is torch.bfloat16
            assert torch.is_inference_mode_enabled()
        with torch.device("meta"), torch_switches.steps(autocast=True):
            assert state()[0] == ("cpu", torch.float32)
            assert torch.is_autocast_enabled("cpu")


def test_a_step_sets_no_dtype_for_other_threads() -> None:
    seen = []
    with SWITCHES["a wide dtype"](), torch_switches.steps():
        thread = Thread(target=lambda: seen.append(torch.empty(1).dtype))
        thread.start()
        thread.join()
    assert seen == [torch.float64]


def test_what_says_its_dtype_keeps_it() -> None:
    with SWITCHES["a wide dtype"](), torch_switches.steps():
        kept = [torch.ones(1, dtype=torch.float16), torch.full((1,), 3), torch.arange(3), torch.tensor([True])]
        copied = torch.as_tensor(torch.ones(2, dtype=torch.float64))
        into = torch.zeros(2, dtype=torch.float64)
        torch.arange(2.0, out=into)
    assert [one.dtype for one in kept] == [torch.float16, torch.int64, torch.int64, torch.bool]
    assert copied.dtype is into.dtype is torch.float64


TRACERS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "FakeTensorMode": lambda called: _inside(FakeTensorMode(), called),
    "torch.func": lambda called: torch.func.grad(called)(torch.ones(2)),
    "torch.vmap": lambda called: torch.vmap(called)(torch.ones(2)),
    "torch.jit.trace": lambda called: torch.jit.trace(called, (torch.ones(2),), check_trace=False),
    "ProxyTorchDispatchMode": lambda called: make_fx(called)(torch.ones(2)),
}


def _inside(mode: Any, called: Callable[[Any], Any]) -> None:
    with mode:
        called(None)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("context", [torch_switches.steps, torch_switches.loading])
@pytest.mark.parametrize("tracer", TRACERS)
def test_where_torch_traces_there_are_no_numbers(tracer: str, context: Any) -> None:
    reached = []

    def called(numbers: Any) -> Any:
        with context():
            reached.append(numbers)
        return numbers.sum()

    with pytest.raises(TargetError, match=f"an engine was called .*{tracer}.*call it outside"):
        TRACERS[tracer](called)
    assert not reached
    with context():  # as before
        pass


def test_modes_that_watch_are_no_tracers() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Watching(), torch_switches.steps():
        assert torch.ones(1).tolist() == [1]


def test_an_error_leaves_the_caller_s_world() -> None:
    with SWITCHES["a narrow dtype"](), torch.device("meta"):
        for context in (torch_switches.steps, torch_switches.loading):
            with pytest.raises(ValueError, match="within"), context():
                raise ValueError("within")
            assert torch.get_default_device().type == "meta"
            assert torch.get_default_dtype() is torch.bfloat16
