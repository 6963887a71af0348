"""Replicas: modules with a model's weights, in eval mode.

A module's mode decides on dropout. Setting it for a while would set it for every other caller of the model, in other
threads and in callbacks. So specdec never sets it. It calls replicas, as torch's DataParallel makes them: objects of
the same classes with the same parameters, buffers and hooks. They are made again whenever the model's modules have
changed, and attributes that a replica writes while it runs are written to the model's module, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["Evaluated", "Parts", "Replicas", "parts_of"]

T = TypeVar("T")
Parts = Mapping[str, "Parts"]
"""Names of modules in a module, and of those in them."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = (*_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_DIFFERS = {*_TABLES, "training", "_modules", "_parameters", "forward", "_compiled_call_impl"}


def parts_of(root: nn.Module, *, whole: bool = False) -> Parts | None:
    """The submodules that need a replica: those in training mode, and their parents. None if there are none.

    ``whole``: all submodules.
    """
    inner = {
        name: parts
        for name, child in root._modules.items()
        if child is not None and (parts := parts_of(child, whole=whole)) is not None
    }
    needed = inner or whole or root.__dict__.get("training")
    return inner if needed and not isinstance(root, torch.jit.ScriptModule) else None


class Replicas:
    """Replicas of a module and of its submodules that need one.

    Args:
        root: the module.
        whole: every module has a replica, with its own tables of hooks.

    Attributes:
        root: the replica of the module, or the module itself if it would not differ.
    """

    def __init__(self, root: nn.Module, *, whole: bool = False) -> None:
        self._whole = whole
        self._made: dict[int, tuple[nn.Module, nn.Module]] = {}
        parts = parts_of(root, whole=whole)
        self.root: nn.Module = root if parts is None else self._make(root, parts)
        for module, replica in self._made.values():  # last, as any function may be bound to any module
            if "forward" in module.__dict__:
                state, seen = replica.__dict__, dict[int, Any]()
                state |= {name: self._bound(value, seen) for name, value in state.items() if callable(value)}
        self._own = {id(replica): module for module, replica in self._made.values()}
        self._spaces = [(own, its, its.copy()) for own, its in self._paired()]  # last, as all is bound now
        tables = [module.__dict__[table] for module, _ in self._made.values() for table in _HOOKS]
        self._seen = _Values([vars(root), *(own for own, _, _ in self._spaces), *tables])
        self._modules = [module for module, _ in self._made.values()]
        self._classes = [*map(type, self._modules)]
        self._kept = _Values([its for _, its, _ in self._spaces])
        self._written = False

    def _paired(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The attributes of each module, and of its replica, and the children of both where they are not the same."""
        for module, replica in self._made.values():
            yield module.__dict__, replica.__dict__
            if module._modules is not replica._modules:
                yield module._modules, replica._modules

    def current(self) -> bool:
        """Whether the modules are as they were: their classes, attributes, children and hooks."""
        return not self._written and [*map(type, self._modules)] == self._classes and self._seen.same()

    def of(self, module: T) -> T:
        """The replica of one of the modules, or itself where it has none."""
        found: Any = self._made.get(id(module))
        return module if found is None else found[1]

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Call the root's replica."""
        output = self.root(*arguments, **options)
        if not self._kept.same():
            self._write()
        return output

    def _write(self) -> None:
        """Copy attributes that replicas wrote to their modules."""
        self._written = True
        for own, its, former in self._spaces:
            for name, value in its.items():
                if name not in _DIFFERS and (name not in former or former[name] is not value):
                    own[name] = self._own.get(id(value), value)

    def _make(self, module: nn.Module, parts: Parts) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)][1]
        own = module.__dict__
        replica: nn.Module = object.__new__(type(module))
        state = own.copy()
        object.__setattr__(replica, "__dict__", state)
        state["training"] = False
        state.pop("_compiled_call_impl", None)  # it is bound to the module
        if parts:
            state["_modules"] = children = dict(module._modules)
            for name, inner in parts.items():
                if (child := children.get(name)) is not None:
                    children[name] = self._make(child, inner)
        self._set_hooks(module, state)
        self._made[id(module)] = module, replica
        return replica

    def _set_hooks(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Hooks are called with the module itself, as hooks may look for it; not where that would be the wrong mode."""
        if self._whole:
            state |= {table: OrderedDict(state[table]) for table in _TABLES}
        for table in _HOOKS:
            if state[table] and not module.training:
                hooks = {key: partial(self._call_hook, hook, module) for key, hook in state[table].items()}
                state[table] = OrderedDict(hooks)

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


class Evaluated:
    """A module that is called in eval mode whatever its own mode is, by replicas that are kept until it changes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._made: Replicas | None = None

    def look(self) -> None:
        """See anew what is in the module, also what calls are not held against: who trains inside, say."""
        self._made = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        made = self._made  # another thread may make others meanwhile
        if made is None or not made.current():
            made = self._made = Replicas(self._module)
        return made.call(*arguments, **options)


class _Values:
    """What is in some dictionaries, held against what is there later, by few calls: each layer asks at each step."""

    def __init__(self, spaces: Sequence[dict[Any, Any]]) -> None:
        self._spaces = spaces
        self._sizes = [*map(len, spaces)]
        self._values = [*chain.from_iterable(map(dict.values, spaces))]

    def same(self) -> bool:
        """Whether the very same values are there."""
        found = chain.from_iterable(map(dict.values, self._spaces))
        return [*map(len, self._spaces)] == self._sizes and all(map(is_, found, self._values))


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
