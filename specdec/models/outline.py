"""What of a live model may change: what was read once, whose change is refused, and weights, which are followed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from specdec.errors import shown
from specdec.step import torch_switches

__all__ = ["Outline", "version_of", "weights_of"]

_Reference: Any = StorageWeakRef  # which keeps no memory, but what tells one piece of it from the next

_ABOUT = ("architectures", "id2label", "label2id")  # of a config, and set when it is saved


class Outline:
    """The numbers of a model's text config, of which its masks were read, and where and in what its embedding is."""

    def __init__(self, config: Any, embedding: nn.Module) -> None:
        self._config, self._embedding = config, embedding
        self._was = copy.deepcopy(self._now())

    def changed(self) -> str | None:
        """What was changed, or None."""
        for (name, was), now in zip(self._was.items(), self._now().values(), strict=True):
            for key, value in was.items():  # what is new is asked for by nothing
                if now.get(key) != value:
                    return f"the {key} of its {name} is {shown(now.get(key))}, and was {shown(value)}"
        return None

    def _now(self) -> dict[str, dict[str, Any]]:
        weight = next(self._embedding.parameters(), None)
        embedding = {} if weight is None else {"dtype": weight.dtype, "device": weight.device}
        return {"embedding": embedding, type(self._config).__name__: _settings(self._config)}


def _settings(config: Any) -> dict[str, Any]:
    """A config's numbers, and lists of them; tokens are another matter, as is what is set while a model runs."""
    return {
        key: value
        for key, value in vars(config).items()
        if type(value) in (int, float, list, dict, type(None))
        and not (key.startswith("_") or "token" in key or key in _ABOUT)
    }


def version_of(model: nn.Module) -> object:
    """Where parameters and buffers are, how often they were written to, and which adapters of peft are active."""
    weights = tuple(map(_state, chain(model.parameters(), model.buffers())))
    adapted = (own for module in model.modules() if "_active_adapter" in (own := vars(module)))
    return weights, tuple((str(own["_active_adapter"]), own.get("_disable_adapters")) for own in adapted)


def _state(weight: torch.Tensor) -> tuple[object, tuple[int, ...], int | None]:
    """Where a weight is, how it lies there, and how often it was written to, as far as torch tells.

    Memory that was given back may be another weight's at once, so an address alone does not tell them apart.
    """
    own: Any = getattr(weight, "_local_tensor", weight)  # of a DTensor
    try:
        place: object = own.data_ptr(), _Reference(own.untyped_storage())
    except (RuntimeError, NotImplementedError):  # a tensor that is made of others has none
        place = id(weight)
    return place, own.stride(), torch_switches.writes_to(own)


def weights_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters by name, also those that are offloaded."""
    for name, weight in sorted(model.named_parameters()):
        if not weight.is_meta:
            yield name, weight
            continue
        owner, _, kind = name.rpartition(".")
        with align_module_device(module := model.get_submodule(owner)):
            yield name, getattr(module, kind)
