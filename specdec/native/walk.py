"""A step's rows through native layers: one call, whatever the number of layers."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from specdec.block import Block
from specdec.cache import KVCache
from specdec.lowering.layer import LoweredLayer
from specdec.lowering.products import Product
from specdec.lowering.tiled import Tiled
from specdec.native.library import CBlock, CLayer, CShape, CSlots, library

__all__ = ["NativeLayer", "NativeLayers"]

_HEADS = range(16, 129, 16)  # head dimensions that the library has code for


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """What the library needs of a layer.

    Attributes:
        products: of queries, keys and values; after attention; of gate and up; and down.
        norms: [D] weights of the norms before attention and before the MLP.
        epsilons: of these norms, and of those per head.
        heads: of queries, and of keys.
        head_norm: [heads, 1, head_dim] weights of norms per query and key head, or None.
    """

    products: tuple[Product, ...]
    norms: tuple[torch.Tensor, torch.Tensor]
    epsilons: tuple[float, float, float]
    heads: tuple[int, int]
    head_dim: int
    scale: float
    head_norm: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: LoweredLayer) -> NativeLayer:
        """A lowered layer, as the library sees it."""
        return cls(
            tuple(layer.products),
            (layer.first_norm.weight, layer.second_norm.weight),
            (layer.first_norm.epsilon, layer.second_norm.epsilon, layer.head_epsilon),
            (layer.query_heads, layer.key_heads),
            layer.head_dim,
            layer.scale,
            layer.head_norm,
        )

    @property
    def fits(self) -> bool:
        """Whether the library has code for it."""
        tiled = all(isinstance(product, Tiled) for product in self.products)
        return tiled and self.head_dim in _HEADS and self.sizes[-1] % 16 == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """What all layers of one call have in common: width, heads, head dimension and the MLP's width."""
        inner: int = self.products[3].inputs  # type: ignore[attr-defined]
        return (len(self.norms[0]), *self.heads, self.head_dim, inner)


class NativeLayers:
    """Layers behind one call; ``of`` says whether the library can run them."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self._dtype = layers[0].norms[0].dtype
        self._held: list[Any] = [*layers]  # whose weights the library reads by address
        self._shape = CShape(*layers[0].sizes, self._dtype is torch.bfloat16)
        self._layers = (CLayer * len(layers))(*map(self._describe, layers))
        self._slots: weakref.WeakKeyDictionary[KVCache, ctypes.Array[CSlots]] = weakref.WeakKeyDictionary()
        self._library = library()

    @staticmethod
    def of(layers: Sequence[NativeLayer | object]) -> NativeLayers | None:
        """These layers, lowered or described, if the library can run them."""
        known = [NativeLayer.of(layer) if isinstance(layer, LoweredLayer) else layer for layer in layers]
        fit = [layer for layer in known if isinstance(layer, NativeLayer) and layer.fits]
        return NativeLayers(fit) if len({layer.sizes for layer in fit}) == 1 and len(fit) == len(layers) else None

    def fits(self, block: Block) -> bool:
        """Whether a block can go this way: any one can, a prefill chunk too."""
        return True

    def run(
        self,
        hidden: torch.Tensor,
        block: Block,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        first: int,
        last: int,
        taps: Collection[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """[T, D] through layers [first, last), and the taps below ``last``."""
        cache, rows, end = block.cache, block.rows, block.first + block.rows
        slots = self._slots.get(cache)
        if slots is None:
            slots = self._slots[cache] = self._describe_slots(cache)
        stream = hidden.to(torch.float32, copy=True).contiguous()
        cos, sines = cos.float(), signed_sin.float()
        if block.parents is None:
            parents, depths = _chain(end)
        else:
            parents = (c_int32 * end)(*block.parents[:end])
            depths = (c_int32 * end)(*block.depths[:end])
        told = CBlock(
            block.length,
            block.first,
            rows,
            ctypes.addressof(parents),
            ctypes.addressof(depths),
            cos.data_ptr(),
            sines.data_ptr(),
        )
        found = {tap: torch.empty(stream.shape) for tap in taps if first <= tap < last}
        wanted = (c_void_p * len(self._layers))(*(found[n].data_ptr() if n in found else None for n in range(last)))
        scratch = torch.empty(self._library.specdec_scratch(byref(self._shape), rows, block.length + end))
        self._library.specdec_walk(
            byref(self._shape),
            self._layers,
            slots,
            byref(told),
            stream.data_ptr(),
            wanted,
            first,
            last,
            scratch.data_ptr(),
            torch.get_num_threads(),
        )
        if self._dtype is torch.float32:
            return stream, found
        return stream.to(self._dtype), {tap: kept.to(self._dtype) for tap, kept in found.items()}

    def _describe(self, layer: NativeLayer) -> CLayer:
        products = [product.described for product in layer.products]  # type: ignore[attr-defined]
        per_head = None if layer.head_norm is None else self._hold(layer.head_norm)
        return CLayer(*products, *map(self._hold, layer.norms), per_head, *layer.epsilons, layer.scale)

    def _hold(self, weight: torch.Tensor) -> int:
        held = weight.float().contiguous()
        self._held.append(held)
        return held.data_ptr()

    def _describe_slots(self, cache: KVCache) -> ctypes.Array[CSlots]:
        return (CSlots * len(cache.keys))(
            *(
                CSlots(keys.data_ptr(), values.data_ptr(), group.size, keys.shape[2], group.window or 0)
                for keys, values, group in zip(cache.keys, cache.values, cache.group_of, strict=True)
            )
        )


_CHAINS: dict[int, tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]] = {}


def _chain(rows: int) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
    """Parents and depths of a chain."""
    if rows not in _CHAINS:
        _CHAINS[rows] = (c_int32 * rows)(*range(-1, rows - 1)), (c_int32 * rows)(*range(rows))
    return _CHAINS[rows]
