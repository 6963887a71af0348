"""Snapshot: the state of a model when it was read, so that later changes are noticed.

Compared objects are kept alive, as the address or ``id()`` of a freed object may be used again. Weights are held by
weak references, so that replaced weights are freed; a dead reference means a change. Edits in place are noticed by
torch's version counters, which tensors made in inference mode lack. Edits that bypass those (``.data``, NumPy, another
process; peft merges adapters so) are noticed by a few values of each weight, on a CPU, and only if one of these values
changed.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import starmap
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_modules

from specdec.errors import shown
from specdec.runners.known_layers import hooks_in, why_special
from specdec.step.torch_switches import writes_to

__all__ = ["Outline", "Snapshot"]

Place = tuple[Any, Any, nn.Module | None]  # in what something is found, by what key, and of which module it is

# What every module has, and what transformers sets for training.
_BASE = {*vars(nn.Module()), "gradient_checkpointing", "_gradient_checkpointing_func", "_is_hf_initialized"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)
_ABOUT = ("architectures", "id2label", "label2id")  # of a config, and set when it is saved
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks")
_SAMPLES = 2  # of 8 bytes, of a weight


class Snapshot:
    """Modules as they were read; a runner that copied their state would not follow a later change.

    Classes, attributes, hooks, children and tensors are compared, which takes less than a microsecond per module.
    Training modes are not compared.

    Args:
        modules: modules that are compared as a whole.
        holders: modules of which only the children are compared, such as the list of layers.
        root: module from which messages name the others.
        everywhere: whether global hooks on all modules count, too.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        *,
        holders: Sequence[nn.Module] = (),
        root: nn.Module | None = None,
        everywhere: bool = True,
    ) -> None:
        self._modules, self._root = list(modules), root
        self._classes = [*map(type, self._modules)]
        self._kinds: list[Any] = [*dict.fromkeys(self._classes)]
        self._forwards = [kind.forward for kind in self._kinds]
        self._plain: list[Place] = []
        self._tensors: list[Place] = []
        self._objects = [place for forward in self._forwards for place in _functions_of(forward)]
        self._sized: list[Place] = [(vars(torch_modules)[name], name, None) for name in _GLOBAL if everywhere]
        for module in self._modules:
            self._read(module, _PARTS)
            self._note(vars(module), vars(module).keys() - _BASE, module)
        for holder in holders:
            self._read(holder, ("_modules",))
        self._spaces = [space for space, _, _ in self._sized]
        self._sizes, self._counts = [*map(len, self._spaces)], [*starmap(_count, self._sized)]
        self._owns = [vars(module) for module in self._modules]
        self._own_sizes = [*map(len, self._owns)]
        self._own_keys = [own.keys() - _BASE for own in self._owns]
        self._values = copy.deepcopy(_found(self._plain))
        self._things = _found(self._objects)
        weights = _found(self._tensors)
        self._refs = [*map(weakref.ref, weights)]
        self._memory = _Memory(weights)

    def _read(self, module: nn.Module, parts: Sequence[str]) -> None:
        for part in parts:
            space = vars(module)[part]
            self._sized.append((space, part, module))
            self._note(space, space, module)

    def _note(self, space: Any, keys: Iterable[Any], module: nn.Module) -> None:
        for key in keys:
            value = space[key]
            tensor = isinstance(value, torch.Tensor)
            places = self._tensors if tensor else self._plain if _is_plain(value) else self._objects
            places.append((space, key, module))

    def changed(self) -> str | None:
        """What was changed, or None. It is asked before every generation, so no function is called for each module."""
        try:
            weights, sizes = _found(self._tensors), [*map(len, self._spaces)]
            if sizes != self._sizes and [*starmap(_count, self._sized)] == self._counts:
                self._sizes = sizes  # hidden states were asked for meanwhile
            same = (
                [*map(type, self._modules)] == self._classes
                and [kind.forward for kind in self._kinds] == self._forwards
                and sizes == self._sizes
                and bool(_found(self._plain) == self._values)
                and all(map(is_, _found(self._objects), self._things))
                and all(map(is_, weights, [ref() for ref in self._refs]))
                and self._memory.is_same(weights)
                and ([*map(len, self._owns)] == self._own_sizes or not any(self._overrides()))
            )
        except Exception:  # something is gone, or what is there now compares as it likes
            same = False
        return None if same else next(self._differences(), "something in its modules")

    def _overrides(self) -> Iterator[tuple[nn.Module, str]]:
        """Attributes that modules got, and that stand before their class's own; nothing asks for others."""
        for module, own, keys in zip(self._modules, self._owns, self._own_keys, strict=True):
            for key in sorted(own.keys() - _BASE - keys):
                if hasattr(type(module), key) or key == "_hf_hook":
                    yield module, key

    def _differences(self) -> Iterator[str]:
        """What is not as it was, one after the other."""
        for module, kind in zip(self._modules, self._classes, strict=True):
            if type(module) is not kind:
                yield f"{self._name(module)} was a {kind.__name__}"
        for module, key in self._overrides():
            yield f"{self._name(module)} {why_special(module) or f'has a {key} of its own'}"
        for kind, forward in zip(self._kinds, self._forwards, strict=True):
            if kind.forward is not forward:
                yield f"the forward of the class {kind.__name__} is another one"
        for (space, part, owner), size in zip(self._sized, self._sizes, strict=True):
            if len(space) != size:
                name = "torch" if owner is None else self._name(owner)
                yield f"{name} has other {'hooks' if 'hooks' in part else part.strip('_')} than before"
        for place, value in zip(self._plain, self._values, strict=True):
            if not _equal(now := _at(place), value):
                yield f"the {place[1]} of {self._name(place[2])} is {shown(now)}, and was {shown(value)}"
        for place, value in zip(self._objects, self._things, strict=True):
            if _at(place) is not value:
                yield f"the {place[1]} of {self._name(place[2])} is another one"
        for number, (place, ref) in enumerate(zip(self._tensors, self._refs, strict=True)):
            weight = _at(place)
            other = weight is not ref()
            told = "is another one" if other else self._memory.told(number, weight)
            if told is not None:
                yield f"the {place[1]} of {self._name(place[2])} {told}"

    def _name(self, module: nn.Module | None) -> str:
        if module is None:
            return "its modeling file"
        modules = () if self._root is None else self._root.named_modules()
        path = next((name for name, one in modules if one is module), "")
        return f"{path} ({type(module).__name__})" if path else f"a {type(module).__name__}"


class _Memory:
    """Where tensors lie, what has been written to them, and some of what is there."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._counted = [number for number, tensor in enumerate(tensors) if writes_to(tensor) is not None]
        self._versions = [tensors[number]._version for number in self._counted]
        self._dense = [number for number, tensor in enumerate(tensors) if type(tensor.data) is torch.Tensor]
        dense = [tensors[number] for number in self._dense]
        # A record that is held, weakly, keeps its address to itself, though the memory that it is of is freed.
        self._held = [StorageWeakRef(tensor.untyped_storage()) for tensor in dense]  # type: ignore[no-untyped-call]
        self._records = [held.cdata for held in self._held]
        self._addresses = [tensor.data_ptr() for tensor in dense]
        self._strides = [tensor.stride() for tensor in dense]
        self._cells_of = [_cells_of(tensor) for tensor in dense]
        self._cells = [cell for cells in self._cells_of for cell in cells]
        self._samples = [*map(_VALUE, self._cells)]

    def is_same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the very same tensors are where they were, with what was there."""
        if [tensors[number]._version for number in self._counted] != self._versions:
            return False
        dense = [tensors[number] for number in self._dense]
        storages = [*map(torch.Tensor.untyped_storage, dense)]  # which stay while cells are read
        return (
            [*map(_RECORD, storages)] == self._records
            and [*map(torch.Tensor.data_ptr, dense)] == self._addresses
            and [*map(torch.Tensor.stride, dense)] == self._strides
            and [*map(_VALUE, self._cells)] == self._samples
        )

    def told(self, number: int, tensor: torch.Tensor) -> str | None:
        """What is not as it was of one of them, or None."""
        was = self._dtypes[number]
        if tensor.dtype is not was:
            return f"is {tensor.dtype}, and was {was}"
        if number in self._counted and tensor._version != self._versions[self._counted.index(number)]:
            return "was edited"
        if number not in self._dense:
            return None
        place = self._dense.index(number)
        where = tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor.stride()
        if where != (self._records[place], self._addresses[place], self._strides[place]):
            return "lies elsewhere in memory"
        before = sum(map(len, self._cells_of[:place]))
        cells = self._cells_of[place]
        there = self._samples[before : before + len(cells)]
        return None if [*map(_VALUE, cells)] == there else "was written to"


class Outline:
    """The state of a model around its layers, as it was read; no runner follows a change of it.

    It holds the numbers of model, decoder and config (factors of hidden states and logits, sizes of masks), the absence
    of further operations around the layers, and the device and dtype of embeddings.

    Args:
        modules: the model and its decoder; none where they are called themselves.
        config: the text config.
    """

    def __init__(self, modules: Sequence[nn.Module], config: Any, embedding: nn.Module) -> None:
        self._modules, self._config, self._embedding = modules, config, embedding
        self._was = self._now()
        self._was[-1] = copy.deepcopy(self._was[-1])

    def changed(self) -> str | None:
        """What was changed, or None."""
        now = self._now()
        if now == self._was:
            return None
        names = [*(type(module).__name__ for module in self._modules), "embedding", type(self._config).__name__]
        for name, values, was in zip(names, now, self._was, strict=True):
            for key, value in was.items():  # what is new is asked for by nothing
                if values.get(key) != value:
                    return f"the {key} of its {name} is {shown(values.get(key))}, and was {shown(value)}"
        return None

    def _now(self) -> list[dict[str, Any]]:
        weight = next(self._embedding.parameters(), None)
        embedding = {} if weight is None else {"dtype": weight.dtype, "device": weight.device}
        return [*map(_around, self._modules), embedding, _settings(self._config)]


def _count(space: Any, part: str, _: nn.Module | None) -> int:
    """How many things are in a module's table, of hooks without those that change nothing."""
    return len(hooks_in(space) if part in _HOOKS else space)


def _around(module: nn.Module) -> dict[str, Any]:
    """A module's numbers, its ``forward`` and hooks."""
    own = vars(module)
    found = {key: value for key, value in own.items() if type(value) in (int, float)}
    hooks = (*(hook for kind in _HOOKS for hook in hooks_in(own[kind])), own.get("_hf_hook"))
    return found | {"forward": own.get("forward", type(module).forward), "hooks": hooks}


def _settings(config: Any) -> dict[str, Any]:
    """A config's numbers, and lists of them; tokens are another matter, as is what is set while a model runs."""
    return {
        key: value
        for key, value in vars(config).items()
        if type(value) in (int, float, list, dict, type(None))
        and not (key.startswith("_") or "token" in key or key in _ABOUT)
    }


_RECORD, _VALUE = attrgetter("_cdata"), attrgetter("value")


def _cells_of(tensor: torch.Tensor) -> list[Any]:
    """Some values of a tensor in this process's memory, to be read again while it is where it was."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes < 8 or not tensor.data_ptr():
        return []
    words = tensor.nbytes // 8
    places = sorted({words * (2 * part + 1) // (2 * _SAMPLES) for part in range(_SAMPLES)})
    return [ctypes.c_int64.from_address(tensor.data_ptr() + 8 * place) for place in places]


def _functions_of(forward: Any) -> list[Place]:
    """The functions that a ``forward`` finds in its file: patched there, they are others for all modules."""
    function = inspect.unwrap(forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    space = getattr(function, "__globals__", {})
    return [(space, name, None) for name in names if isinstance(space.get(name), FunctionType)]


def _found(places: Sequence[Place]) -> list[Any]:
    return [space[key] for space, key, _ in places]


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


def _at(place: Place) -> Any:
    """What is found there now."""
    space, key, _ = place
    return space[key] if key in space else _Nothing()


def _is_plain(value: object) -> bool:
    """Whether a value says all by itself."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | complex | str)


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # what is compared is not ours
        return False
