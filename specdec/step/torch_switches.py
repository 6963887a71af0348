"""Torch's switches: inside the engine they are as torch has them at its start, whatever the caller has set.

Default device, default dtype, autocast and inference mode decide where a tensor lies and how it rounds if the code that
makes it does not say so. A caller sets them for its own code. The engine's code is called in one of two contexts:
``steps`` around everything that decodes, and ``loading`` around everything that makes a model, a drafter or a trainer.
Either costs a microsecond where nothing is set. docs/own_model.md has the table of all switches.

Where torch traces, a tensor has no numbers and no memory; whoever calls the engine there gets an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import RLock, local
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._C import (
    _get_dispatch_mode,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _TorchDispatchModeKey,
)
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from specdec.errors import TargetError

__all__ = ["HOST", "loading", "makes", "reads_weights", "steps", "uncompiled", "writes_to"]

P = ParamSpec("P")
T = TypeVar("T")

HOST = torch.device("cpu")
"""The device of every tensor whose address C receives."""

_DTYPE = torch.float32
_TRACERS = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL, _TorchDispatchModeKey.PROXY)
_AUTOCAST = ("cpu", "cuda", "xpu", "mps")
_NOTHING: AbstractContextManager[None] = nullcontext()


def steps(*, autocast: bool = False) -> AbstractContextManager[None]:
    """The context of everything that decodes: inference mode, and no switch of the caller's.

    The default dtype belongs to all threads of a process, so it is not set here; float tensors that are made without a
    dtype get float32 by a mode of this thread.

    Args:
        autocast: whether the caller's autocast stays, as where a model's own modules run.

    Raises:
        TargetError: torch traces here.
    """
    _check_numbers()
    inside = torch.is_inference_mode_enabled()
    if _is_plain(autocast):
        return _NOTHING if inside else torch.inference_mode()  # inside itself nothing is left to do
    dtype = _NOTHING if torch.get_default_dtype() is _DTYPE else _Float32()
    return _settled(torch.inference_mode(), dtype, autocast=autocast)


def loading() -> AbstractContextManager[None]:
    """The context of everything that makes models, drafters and trainers: no inference mode, nor another switch.

    Raises:
        TargetError: torch traces here.
    """
    _check_numbers()
    if _is_plain(False) and not torch.is_inference_mode_enabled():
        return _NOTHING
    dtype = _NOTHING if torch.get_default_dtype() is _DTYPE else _Float32()
    return _settled(torch.inference_mode(False), dtype)


def writes_to(tensor: torch.Tensor) -> int | None:
    """How many writes to a tensor torch has counted; None where it counts none, as of those made in inference mode."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs as it is where its caller is compiled by ``torch.compile``, with all that it calls."""
    disable: Any = torch.compiler.disable  # torch does not annotate it
    return cast(Callable[P, T], disable(function))


def makes(function: Callable[P, T]) -> Callable[P, T]:
    """A function that is called in the context ``loading``, and as it is where its caller is compiled."""

    @uncompiled
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with loading():
            return function(*args, **kwargs)

    return call


def reads_weights(function: Callable[P, T]) -> Callable[P, T]:
    """A function in which transformers makes a model, for which it sets the default dtype of the whole process.

    One thread does so at a time, as two of them would put back each other's.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _READING:
            callers, _thread.reads = torch.get_default_dtype(), _thread.reads + 1
            torch.set_default_dtype(_DTYPE)
            try:
                return function(*args, **kwargs)
            finally:
                torch.set_default_dtype(callers)
                _thread.reads -= 1

    return call


def _check_numbers() -> None:
    """Raises TargetError where operations are recorded or transformed, and tensors may have no memory."""
    if _len_torch_dispatch_stack() and (mode := next(filter(None, map(_get_dispatch_mode, _TRACERS)), None)):
        where = f"inside torch's {type(mode).__name__}"
    elif peek_interpreter_stack() is not None:
        where = "by a function that torch.func or torch.vmap transforms"
    elif _is_tracing():
        where = "by a function that torch.jit.trace records"
    else:
        return
    raise TargetError(
        f"an engine was called {where}, where tensors may have no numbers; call it outside, and give its text to the "
        "traced function"
    )


def _is_plain(autocast: bool) -> bool:
    """Whether default device, default dtype and, unless it may stay, autocast are as torch has them at its start."""
    return (
        not _len_torch_function_stack()  # a default device is a mode on this stack
        and torch.get_default_dtype() is _DTYPE
        and (autocast or not _is_any_autocast_enabled())
    )


@contextmanager
def _settled(*others: AbstractContextManager[Any], autocast: bool = False) -> Iterator[None]:
    """No default device but the host, no autocast unless it may stay, and the other contexts."""
    with ExitStack() as opened:
        if torch.get_default_device() != HOST:
            opened.enter_context(HOST)
        for kind in _AUTOCAST:
            if not autocast and torch.is_autocast_enabled(kind):
                opened.enter_context(torch.autocast(kind, enabled=False))
        for other in others:
            opened.enter_context(other)
        yield


class _State(local):
    """``reads``: how many functions of this thread that read weights are under way."""

    reads = 0


_thread, _READING = _State(), RLock()


class _Float32(TorchFunctionMode):
    """Float tensors that are made without a dtype are float32, whatever the default dtype is."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if _thread.reads:  # transformers has set the dtype that it wants
            return func(*args, **options)
        if func in _FLOATS and options.get("dtype") is None and options.get("out") is None:
            return func(*args, **{**options, "dtype": _DTYPE})
        made = func(*args, **options)
        if func not in _AS_GIVEN or options.get("dtype") is not None or options.get("out") is not None:
            return made
        given = any(hasattr(value, "dtype") for value in (*args, *options.values()))  # tensors and arrays keep theirs
        if given or made.dtype is not torch.get_default_dtype():
            return made
        return func(*args, **{**options, "dtype": _DTYPE})


_FLOATS = frozenset([
    *(torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace, torch.logspace),
    *(torch.hann_window, torch.hamming_window, torch.empty_strided),
])  # fmt: skip
"""Make floats unless they are told another dtype."""

_AS_GIVEN = frozenset([
    *(torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.full, torch.arange),
])  # fmt: skip
"""Make floats of Python's floats."""
