"""A step's rows through native layers: one call, whatever the number of layers."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from ctypes import byref, c_int32, c_void_p

import torch

from specdec.block import Block
from specdec.cache import KVCache
from specdec.lowering.layer import LoweredLayer
from specdec.lowering.tiled import Tiled
from specdec.native.library import CBlock, CLayer, CShape, CSlots, library

__all__ = ["NativeLayers"]

_MOST_ROWS = 64  # above, torch's attention over a whole block is faster than row after row
_HEADS = range(16, 129, 16)  # head dimensions that the library has code for


class NativeLayers:
    """Lowered layers whose products are all tiled; ``of`` says whether some are."""

    def __init__(self, layers: Sequence[LoweredLayer]) -> None:
        one = layers[0]
        self._lowered = tuple(layers)  # whose weights the library reads by address
        self._dtype = one.first_norm.weight.dtype
        self._held: list[torch.Tensor] = []  # and their norms, in float32
        self._shape = CShape(
            one.first_norm.weight.shape[0],
            one.query_heads,
            one.key_heads,
            one.head_dim,
            one.products[3].inputs,  # type: ignore[attr-defined]
            self._dtype is torch.bfloat16,
        )
        self._layers = (CLayer * len(layers))(*map(self._describe, layers))
        self._slots: weakref.WeakKeyDictionary[KVCache, ctypes.Array[CSlots]] = weakref.WeakKeyDictionary()
        self._library = library()

    @staticmethod
    def of(layers: Sequence[object]) -> NativeLayers | None:
        """These layers, if the library can run them."""
        known = [layer for layer in layers if isinstance(layer, LoweredLayer) and _fits(layer)]
        alike = len({(layer.query_heads, layer.key_heads, layer.head_dim) for layer in known}) == 1
        return NativeLayers(known) if alike and len(known) == len(layers) else None

    def fits(self, block: Block) -> bool:
        """Whether a block is small enough to gain."""
        return block.rows <= _MOST_ROWS

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

    def _describe(self, layer: LoweredLayer) -> CLayer:
        products = [product.described for product in layer.products]  # type: ignore[attr-defined]
        return CLayer(
            *products,
            self._hold(layer.first_norm.weight),
            self._hold(layer.second_norm.weight),
            None if layer.head_norm is None else self._hold(layer.head_norm),
            layer.first_norm.epsilon,
            layer.second_norm.epsilon,
            0.0 if layer.head_norm is None else layer.head_epsilon,
            layer.scale,
        )

    def _hold(self, weight: torch.Tensor) -> int:
        self._held.append(weight.float().contiguous())
        return self._held[-1].data_ptr()

    def _describe_slots(self, cache: KVCache) -> ctypes.Array[CSlots]:
        return (CSlots * len(cache.keys))(
            *(
                CSlots(keys.data_ptr(), values.data_ptr(), group.size, keys.shape[2], group.window or 0)
                for keys, values, group in zip(cache.keys, cache.values, cache.group_of, strict=True)
            )
        )


def _fits(layer: LoweredLayer) -> bool:
    """Whether the library has code for a layer's sizes."""
    products = [product for product in layer.products if isinstance(product, Tiled)]
    return len(products) == len(layer.products) and layer.head_dim in _HEADS and products[3].inputs % 16 == 0


_CHAINS: dict[int, tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]] = {}


def _chain(rows: int) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
    """Parents and depths of a chain."""
    if rows not in _CHAINS:
        _CHAINS[rows] = (c_int32 * rows)(*range(-1, rows - 1)), (c_int32 * rows)(*range(rows))
    return _CHAINS[rows]
