"""Replicas: modules with a model's weights, in eval mode, whose configs name another attention function.

A module of transformers looks up its attention function in its config, and drops out by its mode. Whoever sets either
for a while sets it for every other caller of the model: in other threads, and in callbacks of this one. So neither is
ever set. What specdec calls are replicas, as torch's DataParallel makes them: objects of the same classes with the same
parameters, buffers and hooks. They are made for one call, so that edits of the model are followed, and what a module
writes to its attributes while it runs is written to the model's own, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["Evaluated", "Outline", "Replicas", "outline_of"]

T = TypeVar("T")
Outline = Mapping[str, "Outline"]
"""Names of modules in a module, and of those in them."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = (*_HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_DIFFERS = {*_TABLES, "training", "config", "_modules", "_parameters", "forward", "_compiled_call_impl"}
_IMPLEMENTATION = "_attn_implementation_internal"  # behind the config's property, which sets it in sub-configs too


def outline_of(root: nn.Module, *, attends: bool = False, whole: bool = False) -> Outline | None:
    """What of a module needs a replica: what trains, what calls an attention function if that is to be another one,
    and what these are in; None where nothing does. ``whole``: everything.
    """
    inner = {
        name: outline
        for name, child in root._modules.items()
        if child is not None and (outline := outline_of(child, attends=attends, whole=whole)) is not None
    }
    own = root.__dict__
    needed = inner or whole or own.get("training") or (attends and "layer_idx" in own and "config" in own)
    return inner if needed and not isinstance(root, torch.jit.ScriptModule) else None


class Replicas:
    """Replicas of a module and of those in it.

    Args:
        root: the module.
        outline: which of the modules in it have one; None: those that need one now.
        attention: the attention function that their configs name; None leaves configs as they are.
        whole: every module has a replica, with tables of hooks of its own.
        dtype: of the replicas' floating-point parameters; None: the parameters are the model's.

    Attributes:
        root: the replica of the module, or the module itself where nothing would differ.
    """

    def __init__(
        self,
        root: nn.Module,
        outline: Outline | None = None,
        *,
        attention: str | None = None,
        whole: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._attention, self._whole, self._dtype = attention, whole, dtype
        self._made: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._configs: dict[int, Any] = {}
        if outline is None:
            outline = outline_of(root, attends=attention is not None, whole=whole)
        self.root: nn.Module = root if outline is None else self._make(root, outline)
        for module, replica in self._made.values():  # last, as any function may be bound to any module
            if "forward" in module.__dict__:
                state, seen = replica.__dict__, dict[int, Any]()
                state |= {name: self._bound(value, seen) for name, value in state.items() if callable(value)}

    def of(self, module: T) -> T:
        """The replica of one of the modules, or itself where it has none."""
        found: Any = self._made.get(id(module))
        return module if found is None else found[1]

    def call(self, *arguments: Any, **options: Any) -> Any:
        """What the root's replica returns."""
        states = [(module.__dict__, replica.__dict__) for module, replica in self._made.values()]
        before = [[*map(id, state.values())] for _, state in states]  # of values that the module holds meanwhile
        output = self.root(*arguments, **options)
        for (own, state), former in zip(states, before, strict=True):
            if [*map(id, state.values())] != former:
                own |= {name: value for name, value in state.items() if name not in _DIFFERS}
        return output

    def _make(self, module: nn.Module, outline: Outline) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)][1]
        own = module.__dict__
        replica: nn.Module = object.__new__(type(module))
        state = own.copy()
        object.__setattr__(replica, "__dict__", state)
        state["training"] = False
        state.pop("_compiled_call_impl", None)  # it is bound to the module
        if outline:
            state["_modules"] = children = dict(module._modules)
            for name, inner in outline.items():
                if (child := children.get(name)) is not None:
                    children[name] = self._make(child, inner)
        if self._attention is not None and "config" in own and (self._whole or "layer_idx" in own):
            state["config"] = self._config(own["config"])
        if self._dtype is not None:
            state["_parameters"] = {name: self._cast(weight) for name, weight in module._parameters.items()}
        if self._whole or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            self._set_hooks(module, state)
        self._made[id(module)] = module, replica
        return replica

    def _set_hooks(self, module: nn.Module, state: dict[str, Any]) -> None:
        """Hooks are called with the module itself, as hooks may look for it; not where that would be the wrong mode."""
        if self._whole:
            state |= {table: OrderedDict(state[table]) for table in _TABLES}
        elif not module.training:
            for table in _HOOKS:
                if state[table]:
                    hooks = {key: partial(_on_module, hook, module) for key, hook in state[table].items()}
                    state[table] = OrderedDict(hooks)

    def _config(self, config: Any) -> Any:
        """A copy of a config, and of those in it, that names the attention function."""
        own = _attributes(config)
        if _IMPLEMENTATION not in own:
            return config
        if id(config) not in self._configs:
            self._configs[id(config)] = copied = object.__new__(type(config))
            state = {name: self._config(value) for name, value in own.items()} if self._whole else own.copy()
            state[_IMPLEMENTATION] = self._attention
            object.__setattr__(copied, "__dict__", state)
        return self._configs[id(config)]

    def _cast(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        return weight.to(self._dtype) if weight is not None and weight.is_floating_point() else weight

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
    """A module, called in eval mode whatever its own mode is."""

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._module, self._dtype = module, dtype

    def __call__(self, *arguments: Any) -> Any:
        return Replicas(self._module, whole=self._dtype is not None, dtype=self._dtype).call(*arguments)


def _attributes(config: Any) -> dict[str, Any]:
    """An object's own, read past ``__getattribute__``, which is slow in configs."""
    try:
        found: dict[str, Any] = object.__getattribute__(config, "__dict__")
    except AttributeError:
        return {}
    return found


def _on_module(hook: Callable[..., Any], module: nn.Module, replica: nn.Module, *rest: Any) -> Any:
    """Call a hook with the module; the replica has what it wrote there."""
    output = hook(module, *rest)
    replica.__dict__.update({name: value for name, value in module.__dict__.items() if name not in _DIFFERS})
    return output


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
