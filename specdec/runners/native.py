"""Native: a step's rows through all layers in one call of C, whatever the number of layers, on a CPU.

``specdec/native/layers.c`` computes, on weights in panels that it streams. A row's sums run in one order whatever rows
are beside it, so accepted rows are plain decoding's bit for bit.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Mapping, Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from specdec.block import Block, Rows
from specdec.cache import KVCache
from specdec.joints import Joints
from specdec.native.library import CHead, CLayer, CRows, CShape, CSlots, CTurns, library
from specdec.native.scores import Found, Stored
from specdec.pages import FilePages, trim_heap
from specdec.replicas import Evaluated
from specdec.rotary import Rotary
from specdec.runners.known import KnownHead, KnownLayer, gain, gains, is_known_norm, stacked
from specdec.runners.layers import FusedNorm
from specdec.runners.linear import PackedWeight, TiedEmbedding
from specdec.runners.runner import FINAL, Finished, LayerRunner
from specdec.runners.snapshot import Snapshot
from specdec.sampling import Peaks

__all__ = ["NativeLayer", "NativeLayers", "NativeRunner", "runs_heads_of", "why_not"]

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """What the library needs of a layer.

    Attributes:
        products: of queries, keys and values; after attention; of gate and up; and down.
        norms: [D] weights of the norms before attention and before the MLP.
        epsilons: of these norms, and of those per head.
        heads: of queries, and of keys.
        head_norm: [heads, 1, head_dim] weights of norms per query and key head, or None.
        after: weights [D] and epsilons of the norms of what attention and the MLP add, or none.
        cap: of attention's scores, by a tanh; 0 for none.
        turns: which of several rotary tables it reads.
    """

    products: tuple[PackedWeight, ...]
    norms: tuple[torch.Tensor, torch.Tensor]
    epsilons: tuple[float, float, float]
    heads: tuple[int, int]
    head_dim: int
    scale: float
    head_norm: torch.Tensor | None = None
    after: Sequence[tuple[torch.Tensor, float]] = ()
    cap: float = 0.0
    turns: int = 0


def runs_heads_of(head_dim: int, inner: int) -> bool:
    """Whether the library has code for such heads and such an MLP."""
    return head_dim % 16 == 0 and inner % 16 == 0


def why_not(layers: Sequence[KnownLayer], head_dim: int) -> str | None:
    """Why the library cannot run these layers, whose rotary positions have ``head_dim``; None where it can."""
    first = layers[0]
    weight = first.linears[0][0].module.weight
    if weight.device.type != "cpu":
        return f"native layers run on a CPU, and the model is on {weight.device}"
    if weight.dtype not in _DTYPES:
        return f"native layers compute in float32 and bfloat16, and the model in {str(weight.dtype)[6:]}"
    sizes = {(layer.query_heads, layer.key_heads, layer.head_dim, layer.inner, layer.gelu) for layer in layers}
    if len(sizes) > 1:
        return "native layers need all layers to have the same sizes"
    if not runs_heads_of(first.head_dim, first.inner) or head_dim != first.head_dim:
        return (
            f"native layers need heads of a multiple of 16 values, all of them rotated, and an MLP of a multiple of "
            f"16; here it is {first.head_dim} (of which {head_dim} rotated) and {first.inner}"
        )
    if library() is None:
        return "native layers need a C compiler (cc, gcc or clang), and none works here"
    return None


class NativeLayers:
    """Layers of the same sizes behind one call."""

    def __init__(self, layers: Sequence[NativeLayer], *, gelu: bool = False) -> None:
        first = layers[0]
        self._dtype = first.products[0].dtype
        self._held: list[Any] = [*layers]  # whose weights the library reads by address
        inner = first.products[3].inputs
        half = self._dtype is torch.bfloat16
        self._library = library()
        tiles = self._library.specdec_tiles()
        self._shape = CShape(len(first.norms[0]), *first.heads, first.head_dim, inner, half, gelu, tiles)
        self._layers = (CLayer * len(layers))(*map(self._describe, layers))
        self._turns: tuple[torch.Tensor, torch.Tensor, ctypes.Array[CTurns]] | None = None

    def run(
        self,
        hidden: torch.Tensor | None,
        block: Rows,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        first: int,
        last: int,
        taps: Collection[int],
        *,
        by_row: bool = True,
        reading: Reading | None = None,
        embedding: PackedWeight | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """[T, D] through layers [first, last), and what goes into those of ``taps`` below ``last``.

        Where ``hidden`` is None it is the rows' tokens by the ``embedding``. Cosines and sines are float32: [T, d], of
        the rows; if not ``by_row`` [K, positions, d], of positions 0, 1, 2, ... by the layers' tables. What a
        ``reading`` asks for is there afterwards.
        """
        tokens, start = None, None
        if hidden is None:
            assert embedding is not None
            tokens = (c_int64 * block.rows)(*block.ids)
        else:
            if hidden.dtype is not self._dtype or not hidden.is_contiguous():
                hidden = hidden.to(self._dtype).contiguous()
            start = hidden.data_ptr()
        out = torch.empty(block.rows, self._shape.hidden, dtype=self._dtype)
        keys, described, held = 0, list[int](), list[Any]()
        for part, _, _ in block.parts:
            tree, slots = _tree(part), _slots_of(part.cache)
            held.append((tree, slots))
            keys = max(keys, part.length + part.first + part.rows)
            described += (part.length, part.first, part.rows, *map(addressof, tree), addressof(slots))
        blocks = (c_int64 * len(described))(*described)  # a Block of layers.c is six numbers
        turns = self._described(cos, signed_sin, by_row)
        told = CRows(block.rows, len(held), keys, addressof(blocks), addressof(turns), by_row)
        if tokens is not None and embedding is not None:
            told.tokens, told.embedding = addressof(tokens), addressof(embedding.described)
        found = {tap: torch.empty(out.shape, dtype=self._dtype) for tap in taps if first <= tap < last}
        wanted = None
        if found:
            wanted = (c_void_p * last)(*(found[n].data_ptr() if n in found else None for n in range(last)))
        self._library.specdec_run_layers(
            byref(self._shape),
            self._layers,
            byref(told),
            start,
            out.data_ptr(),
            wanted,
            first,
            last,
            *(_NO_HEAD if reading is None else reading.arguments),
            torch.get_num_threads(),
        )
        return out, found

    def _described(self, cos: torch.Tensor, signed_sin: torch.Tensor, by_row: bool) -> ctypes.Array[CTurns]:
        """Where rotary tables lie; those of positions, which come again, are asked once."""
        known = self._turns
        if known is not None and known[0] is cos and known[1] is signed_sin:
            return known[2]
        tables = [(cos, signed_sin)] if by_row else [*zip(cos, signed_sin, strict=True)]
        turns = (CTurns * len(tables))(*(CTurns(one.data_ptr(), other.data_ptr()) for one, other in tables))
        if not by_row:
            self._turns = cos, signed_sin, turns
        return turns

    def _describe(self, layer: NativeLayer) -> CLayer:
        products = [product.described for product in layer.products]
        per_head = None if layer.head_norm is None else self._hold(layer.head_norm)
        after = map(self._hold, (weight for weight, _ in layer.after)) if layer.after else (None, None)
        epsilons = [*layer.epsilons, *(epsilon for _, epsilon in layer.after)] + [0.0] * (2 - len(layer.after))
        norms = [*map(self._hold, layer.norms), per_head, *after]
        return CLayer(*products, *norms, *epsilons, layer.scale, layer.cap, layer.turns)

    def _hold(self, weight: torch.Tensor) -> int:
        held = weight.float().contiguous()
        self._held.append(held)
        return held.data_ptr()


class NativeHead:
    """The last norm and a packed head, which follow the last layer in the same call."""

    def __init__(self, weight: torch.Tensor, epsilon: float, product: PackedWeight) -> None:
        self._norm, self._product = weight.float().contiguous(), product
        self._head = CHead(product.described, self._norm.data_ptr(), epsilon)

    def reading(
        self,
        total: int,
        rows: Sequence[int] | None,
        final: bool,
        likeliest: int = 1,
        draws: Mapping[int, tuple[float, int]] | None = None,
    ) -> Reading:
        """What is to be read of ``total`` rows after the last layer; ``draws``: of those rows, some."""
        count, dtype = total if rows is None else len(rows), self._product.dtype
        normed = torch.empty(total, self._product.inputs, dtype=dtype) if final else None
        logits = torch.empty(count, self._product.outputs, dtype=dtype) if count else None
        best, address, half = (c_int64 * count)(), _address(logits), dtype is torch.bfloat16
        wanted = None if rows is None else (c_int64 * count)(*rows)
        most = min(likeliest, self._product.outputs) if likeliest > 1 else 0  # the largest alone takes less
        found = Found(most, array("q", bytes(8 * count * most)), array("f", bytes(4 * count * most))) if most else None
        stored = None if address is None else Stored(address, count, self._product.outputs, half, found)
        places = (None, None) if found is None else (found.places.buffer_info()[0], found.values.buffer_info()[0])
        by = keys = drawn = None
        if draws and count:
            by, keys, drawn = (c_float * count)(), (c_uint64 * count)(), (c_int64 * count)()
            for place, row in enumerate(range(count) if rows is None else rows):
                if row in draws:
                    by[place], keys[place] = draws[row]
        given = (self._head, _address(normed), wanted, count, address, best, most, *places, by, keys, drawn)
        return Reading(normed, logits, stored, best, drawn, given)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What is read after the last layer.

    Attributes:
        normed: [T, D] all rows after the last norm, if they are wanted.
        logits: [R, V] of the rows that are, if any.
        stored: where they lie.
        best: the token with the largest of each row's, -1 where they are no distribution.
        drawn: the tokens that were drawn, -1 where none was or it is to be found otherwise; None where none are to be.
        arguments: of the library, that say so.
    """

    normed: torch.Tensor | None
    logits: torch.Tensor | None
    stored: Stored | None
    best: ctypes.Array[c_int64]
    drawn: ctypes.Array[c_int64] | None
    arguments: tuple[Any, ...]


_NO_HEAD = (None, None, None, 0, None, None, 0, None, None, None, None, None)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeRunner(LayerRunner):
    """A model's layers and, where it is a plain one, its head.

    ``owned``: packed weights take the place of the model's own, layer by layer, so that none is held twice. Otherwise
    they are copies beside it. ``kinds``: of each layer's attention, where rotary positions differ by it.
    """

    name = "native"

    def __init__(
        self,
        model: Any,
        layers: Sequence[KnownLayer],
        head: KnownHead | None,
        *,
        norm: nn.Module,
        rotary: Rotary,
        kinds: Sequence[str] | None,
        holders: Sequence[nn.Module],
        owned: bool,
    ) -> None:
        self._rotary = rotary
        named = sorted(set(kinds or ()))
        self._kinds: list[str | None] = [*named] or [None]
        files = FilePages() if owned else None
        trim_heap()
        packed_head = None if head is None else _pack_head(head, files)
        tables = [0] * len(layers) if kinds is None else map(named.index, kinds)
        packed = [_pack_layer(layer, files, table) for layer, table in zip(layers, tables, strict=True)]
        self._native = NativeLayers(packed, gelu=layers[0].gelu)
        trim_heap()
        embedding = model.get_input_embeddings()
        self.embed = embedding if isinstance(embedding, TiedEmbedding) else Evaluated(embedding)
        self.head = packed_head or Evaluated(model.get_output_embeddings())
        self.alike = packed_head is not None
        last = gain(norm)
        self.norm = FusedNorm(norm) if is_known_norm(norm) else Evaluated(norm)
        self._head = None if packed_head is None or last is None else NativeHead(*last, packed_head.packed)
        read = [module for layer in layers for module in layer.module.modules()]
        if head is not None:
            read.append(head.head.module)
        self._like = torch.empty(1, 0, dtype=packed[0].products[0].dtype)  # as hidden states, for rotary modules
        self._embedding = None
        if isinstance(self.embed, TiedEmbedding):
            self._embedding = self.embed.store
            self.looks_up = self.embed.scale is None
            read.append(self.embed)
        self._snapshot = Snapshot(read if last is None else [*read, norm], holders=holders, root=model)
        self._turns: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self, block: Rows) -> torch.Tensor:
        return self.embed.look_up(block.ids) if isinstance(self.embed, TiedEmbedding) else super().enter(block)

    def run(
        self,
        hidden: torch.Tensor | None,
        block: Rows,
        first: int,
        last: int,
        taps: Collection[int],
        reading: Reading | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        like = self._like if hidden is None else hidden
        if not self._rotary.fixed:
            angles = self._rotary.of(block, like)
            turns = angles.cos.float().contiguous(), angles.signed_sin.float().contiguous()
        elif self._turns is None or self._turns[0].shape[1] < block.end:
            tables = [self._rotary.whole(block, like, kind) for kind in self._kinds]
            cos, _, signed_sin = (torch.stack(values).float() for values in zip(*tables, strict=True))
            turns = self._turns = cos, signed_sin
        else:
            turns = self._turns
        return self._native.run(
            hidden,
            block,
            *turns,
            first,
            last,
            taps,
            by_row=not self._rotary.fixed,
            reading=reading,
            embedding=self._embedding,
        )

    def finish(
        self,
        hidden: torch.Tensor | None,
        block: Rows,
        first: int,
        last: int,
        taps: Collection[int],
        rows: Sequence[int] | None,
        joints: Joints,
        likeliest: int = 1,
    ) -> Finished:
        if self._head is None or not joints.plain:
            return super().finish(hidden, block, first, last, taps, rows, joints)
        draws = {start: part.draw for part, start, _ in block.parts if part.draw is not None}
        reading = self._head.reading(block.rows, rows, FINAL in taps, likeliest, draws)
        hidden, found = self.run(hidden, block, first, last, taps, reading)
        if reading.normed is not None:
            found[FINAL] = reading.normed
        drawn = () if reading.drawn is None else reading.drawn[:]
        peaks = None if reading.stored is None else Peaks(reading.best[:], reading.stored, drawn)
        return hidden, found, reading.logits, peaks

    def changed(self) -> str | None:
        return self._snapshot.changed()


def _pack_layer(layer: KnownLayer, files: FilePages | None, turns: int) -> NativeLayer:
    """A layer's weights in panels; with ``files``, in the place of its own. ``turns``: its rotary table."""
    products = []
    for places in layer.linears:
        weights = [place.module.weight.data for place in places]
        packed = PackedWeight(*stacked(places))
        if files is not None:
            packed.install(places)
            files.release(weights)
        products.append(packed)
        del weights
    trim_heap()
    (first, epsilon), (second, other) = gains(layer.norms)
    head_norm = layer.head_norm()
    return NativeLayer(
        tuple(products),
        (first, second),
        (epsilon, other, 0.0 if head_norm is None else head_norm[1]),
        (layer.query_heads, layer.key_heads),
        layer.head_dim,
        layer.scale,
        None if head_norm is None else head_norm[0],
        gains(layer.after),
        layer.cap,
        turns,
    )


def _pack_head(head: KnownHead, files: FilePages | None) -> _PackedHead | None:
    """A head's weight in panels; with ``files``, in its place and in that of an embedding that shares it."""
    linear = head.head.module
    weight = linear.weight.data
    if not PackedWeight.takes(weight):
        return None
    packed = PackedWeight(weight, None if linear.bias is None else linear.bias.data)
    if files is not None:
        packed.install([head.head])
        if head.embedding is not None:
            head.embedding.put(TiedEmbedding(packed, head.embedding.module))
        files.release([weight])
    return _PackedHead(packed, head.head.module)


class _PackedHead:
    """A packed head; where gradients are wanted, the model's own, as the library knows none."""

    def __init__(self, packed: PackedWeight, module: Any) -> None:
        self.packed, self._module = packed, module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.requires_grad:
            logits: torch.Tensor = self._module(hidden)
            return logits
        return self.packed(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)


def _slots_of(cache: KVCache) -> ctypes.Array[CSlots]:
    """A cache's slots of every layer, described anew where they have moved."""
    if cache.described is None:
        layers = zip(cache.keys, cache.values, cache.group_of, strict=True)
        slots = [
            CSlots(k.data_ptr(), v.data_ptr(), group.size, k.shape[2], group.window or 0) for k, v, group in layers
        ]
        cache.described = (CSlots * len(slots))(*slots)
    return cache.described  # type: ignore[no-any-return]


def _tree(block: Block) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
    """Parents and depths of the tree's rows up to the block's last."""
    end = block.first + block.rows
    if block.parents is None:
        return _chain(end)
    return (c_int32 * end)(*block.parents[:end]), (c_int32 * end)(*block.depths[:end])


@cache
def _chain(rows: int) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
    """Parents and depths of a chain."""
    return (c_int32 * rows)(*range(-1, rows - 1)), (c_int32 * rows)(*range(rows))
