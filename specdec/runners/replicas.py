"""Replicas: a model with another one's weights, in eval mode, for what is only looked at.

A module's mode decides on dropout. Setting it for a while would set it for every other caller of the model, in other
threads and in callbacks; and so would hooks, and other numbers of experts. So specdec never sets them. What looks at a
model calls a replica of it, as torch's DataParallel makes them: objects of the same classes with the same parameters,
buffers and hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import jit, nn

__all__ = ["Replicas"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = (*_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_DIFFERS = {*_TABLES, "training", "_modules", "_parameters", "forward", "_compiled_call_impl"}


class Replicas:
    """Replicas of a module and of its submodules.

    Args:
        root: the module.

    Attributes:
        root: the replica of the module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._made: dict[int, tuple[nn.Module, nn.Module]] = {}
        self.root = self._make(root)
        for module, replica in self._made.values():  # last, as any function may be bound to any module
            if "forward" in module.__dict__:
                state, seen = replica.__dict__, dict[int, Any]()
                state |= {name: self._bound(value, seen) for name, value in state.items() if callable(value)}

    def of(self, module: nn.Module) -> nn.Module:
        """The replica of one of the modules, or itself where it has none."""
        return self._made.get(id(module), (module, module))[1]

    def _make(self, module: nn.Module) -> nn.Module:
        if isinstance(module, jit.ScriptModule):
            return module
        if id(module) in self._made:
            return self._made[id(module)][1]
        replica: nn.Module = object.__new__(type(module))
        state = module.__dict__.copy()
        object.__setattr__(replica, "__dict__", state)
        state["training"] = False
        state.pop("_compiled_call_impl", None)  # it is bound to the module
        state["_modules"] = {
            name: None if child is None else self._make(child) for name, child in module._modules.items()
        }
        for (
            table
        ) in _HOOKS:  # a hook gets the module itself, as it may look for it; a training module keeps its own hooks
            if state[table] and not module.training:
                hooks = {key: partial(self._call_hook, hook, module) for key, hook in state[table].items()}
                state[table] = OrderedDict(hooks)
        self._made[id(module)] = module, replica
        return replica

    def _call_hook(self, hook: Callable[..., Any], module: nn.Module, replica: nn.Module, *rest: Any) -> Any:
        """Call a hook with the module, and copy the attributes that it wrote to the replica."""
        before = module.__dict__.copy()
        output = hook(module, *rest)
        for name, value in module.__dict__.items():
            if name not in _DIFFERS and (name not in before or before[name] is not value):
                replica.__dict__[name] = value
        return output

    def _bound(self, value: Any, seen: dict[int, Any]) -> Any:
        """A function with replicas for the modules that it is bound to or closes over; anything else as it is.

        A ``forward`` of a module's own (accelerate's, a user's) would otherwise run the module itself.
        """
        if isinstance(value, nn.Module):
            return self.of(value)
        if id(value) in seen or not isinstance(value, MethodType | FunctionType | partial):
            return seen.get(id(value), value)
        seen[id(value)] = value  # for functions that name themselves
        again = partial(self._bound, seen=seen)
        made = value
        if isinstance(value, MethodType):
            parts = again(value.__func__), again(value.__self__)
            if parts[0] is not value.__func__ or parts[1] is not value.__self__:
                made = MethodType(*parts)
        elif isinstance(value, partial):
            made = partial(again(value.func), *map(again, value.args), **_each(again, value.keywords))
        else:
            made = _rebuilt(value, again)
        seen[id(value)] = made
        return made


def _each(change: Callable[[Any], Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in values.items()}


def _rebuilt(function: FunctionType, change: Callable[[Any], Any]) -> FunctionType:
    """A function with what it closes over, and its defaults, changed; the same one where nothing changes."""
    cells = list(function.__closure__ or ())
    for place, cell in enumerate(cells):
        try:
            held = cell.cell_contents
        except ValueError:  # empty so far
            continue
        if (changed := change(held)) is not held:
            cells[place] = CellType(changed)
    defaults = tuple(map(change, function.__defaults__ or ()))
    named = _each(change, function.__kwdefaults__ or {})
    before = (*(function.__closure__ or ()), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    if all(map(lambda new, old: new is old, (*cells, *defaults, *named.values()), before)):
        return function
    made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, tuple(cells))
    made.__kwdefaults__ = named or None
    made.__dict__.update(function.__dict__)
    return made
