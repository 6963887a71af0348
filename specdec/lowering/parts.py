"""Parts: what stands in a model in the place of linears whose weights are stored in another layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Part", "Rows", "Site", "Store", "replace"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where a module hangs in the model."""

    owner: nn.Module
    name: str

    @property
    def linear(self) -> nn.Linear:
        found: nn.Linear = getattr(self.owner, self.name)
        return found

    @classmethod
    def of(cls, module: nn.Module, model: nn.Module) -> Site | None:
        """The place of a module in a model, or None."""
        places = (cls(owner, name) for owner in model.modules() for name, child in owner.named_children())
        return next((place for place in places if getattr(place.owner, place.name) is module), None)


class Store(Protocol):
    """Whoever holds the weight."""

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], if there is one."""

    def unpack(self) -> torch.Tensor:
        """[out, in] the very weight that was stored."""


class RowStore(Store, Protocol):
    """A store that an embedding can read too."""

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """[..., in] rows of the weight, by their numbers."""


def replace(sites: Sequence[Site], store: Store) -> None:
    """Put parts of a product in the places of the linears that it was made of."""
    start = 0
    for site in sites:
        stop = start + site.linear.out_features
        setattr(site.owner, site.name, Part(store, start, stop))
        start = stop


class Part(nn.Module):
    """Rows [start, stop) of a product's weight in the place of the linear that they were: exact, and slow if packed.

    A deep copy is a plain linear again.
    """

    def __init__(self, store: Store, start: int, stop: int) -> None:
        super().__init__()
        self._store, self._rows = store, slice(start, stop)
        self.out_features = stop - start

    @property
    def weight(self) -> torch.Tensor:
        """[out, in] a copy; changing it changes nothing."""
        return self._store.unpack()[self._rows].clone(memory_format=torch.contiguous_format)

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self._store.bias is None else self._store.bias[self._rows]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._store.unpack()[self._rows], self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        weight, bias = self.weight, self.bias
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
        linear.weight = nn.Parameter(weight)
        if bias is not None:
            linear.bias = nn.Parameter(bias.clone())
        memo[id(self)] = linear
        return linear


class Rows(nn.Module):
    """A product's weight in the place of the embedding that shares it; a deep copy is a plain embedding again."""

    def __init__(self, store: RowStore) -> None:
        super().__init__()
        self._store = store

    @property
    def weight(self) -> torch.Tensor:
        """[vocabulary, D] a copy; changing it changes nothing."""
        return self._store.unpack().clone(memory_format=torch.contiguous_format)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._store.look_up(tokens)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Embedding:
        weight = self.weight
        embedding = nn.Embedding(weight.shape[0], weight.shape[1], device="meta", dtype=weight.dtype)
        embedding.weight = nn.Parameter(weight)
        memo[id(self)] = embedding
        return embedding
