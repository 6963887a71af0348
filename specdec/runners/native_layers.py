"""Packed layers and a packed head, run by one call of C."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection, Mapping, Sequence
from ctypes import addressof, byref, c_float, c_int32, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.native.library import library
from specdec.native.scores import Stored
from specdec.native.types import CCosSin, CExperts, CHead, CLayer, CProduct, CRows, CShape, CSlots, place_of
from specdec.runners.linear import PackedWeight
from specdec.step.cache import KVCache
from specdec.step.step_io import StepInput
from specdec.step.step_output import Top
from specdec.step.torch_switches import HOST

__all__ = [
    "NativeExperts",
    "NativeLayer",
    "NativeLayers",
    "address_of",
    "described_rows",
    "described_slots",
    "described_turns",
    "runs_heads_of",
]


@dataclass(frozen=True, slots=True, eq=False)
class NativeExperts:
    """The experts of a layer.

    Attributes:
        router: weight of a logit for each expert.
        gate_up, down: of each expert.
        chosen: experts of a row.
        norm_topk: the shares of a row's experts add up to one; else those of all experts do.
    """

    router: PackedWeight
    gate_up: Sequence[PackedWeight]
    down: Sequence[PackedWeight]
    chosen: int
    norm_topk: bool


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """The data of a layer that the library reads.

    Attributes:
        products: weights of queries, keys and values; of attention's output; and, but where there are experts, of gate
            and up, and of down.
        norms: [D] weights of the norms before attention and before the MLP; None for the first where there is none.
        epsilons: epsilons of these two norms, and of the norms per head.
        heads: numbers of query and key heads.
        head_norm: [heads, 1, head_dim] weights of norms per query and key head, or None.
        after: weights [D] and epsilons of the norms on the outputs of attention and MLP, or empty.
        cap: bound of attention's scores, applied by tanh; 0 for none.
        rotary_table: index of the layer's rotary table.
        experts: in place of one gated MLP, or None.
        norms_all: ``head_norm`` is one norm of all queries and one of all keys; else one for each head.
    """

    products: tuple[PackedWeight, ...]
    norms: tuple[torch.Tensor | None, torch.Tensor]
    epsilons: tuple[float, float, float]
    heads: tuple[int, int]
    head_dim: int
    scale: float
    head_norm: torch.Tensor | None = None
    after: Sequence[tuple[torch.Tensor, float]] = ()
    cap: float = 0.0
    rotary_table: int = 0
    experts: NativeExperts | None = None
    norms_all: bool = False

    @property
    def inner(self) -> int:
        """Width of the MLP, or of each expert."""
        down = self.products[3] if self.experts is None else self.experts.down[0]
        return down.inputs


def runs_heads_of(head_dim: int, inner: int) -> bool:
    """Whether the library has code for this head dimension and MLP width."""
    return head_dim % 16 == 0 and inner % 16 == 0


class NativeLayers:
    """Layers of equal sizes, but for the widths of their MLPs, that one call runs."""

    def __init__(self, layers: Sequence[NativeLayer], *, gelu: bool = False) -> None:
        first = layers[0]
        self._dtype = first.products[0].dtype
        self._held: list[Any] = [*layers]  # the library reads these objects' weights by address
        self._experts: list[tuple[CExperts, int]] = []  # and how many of them a row has
        inner = max(layer.inner for layer in layers)
        experts = max(0 if layer.experts is None else len(layer.experts.down) for layer in layers)
        half = self._dtype is torch.bfloat16
        self._library = library()
        tiles = self._library.specdec_tiles()
        self._shape = CShape(first.products[1].outputs, *first.heads, first.head_dim, inner, experts, half, gelu, tiles)
        self._layers = (CLayer * len(layers))(*map(self._describe, layers))
        self._cos_sin: tuple[torch.Tensor, torch.Tensor, ctypes.Array[CCosSin]] | None = None

    def run(
        self,
        hidden: torch.Tensor | None,
        step: StepInput,
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
        """Run [T, D] through layers [first, last); returns the result and, by layer, the inputs of layers in ``taps``.

        Where ``hidden`` is None, the input is the ``embedding`` of the rows' tokens. Cosines and sines are float32:
        [T, d] with ``by_row``; otherwise [K, positions, d] for positions 0, 1, 2, ... in each of K rotary tables. The
        call fills the ``reading``.
        """
        tokens, start = None, None
        if hidden is None:
            assert embedding is not None
            tokens = step.ids
        else:
            if hidden.dtype is not self._dtype or not hidden.is_contiguous():
                hidden = hidden.to(self._dtype).contiguous()
            start = hidden.data_ptr()
        out = torch.empty(step.rows, self._shape.hidden, dtype=self._dtype, device=HOST)
        cos_sin = self._described(cos, signed_sin, by_row)
        told, held = described_rows(step, cos_sin, by_row=by_row)
        if tokens is not None and embedding is not None:
            told.tokens, told.embedding = place_of(tokens), addressof(embedding.described)
        found = {tap: torch.empty(out.shape, dtype=self._dtype, device=HOST) for tap in taps if first <= tap < last}
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
        del held  # the library has read them
        return out, found

    @property
    def described(self) -> tuple[CShape, ctypes.Array[CLayer]]:
        """The layers' sizes, and the layers, as the library reads them; valid while this object is."""
        return self._shape, self._layers

    def _described(self, cos: torch.Tensor, signed_sin: torch.Tensor, by_row: bool) -> ctypes.Array[CCosSin]:
        """Addresses of the rotary tables; those of tables by position are cached."""
        known = self._cos_sin
        if known is not None and known[0] is cos and known[1] is signed_sin:
            return known[2]
        cos_sin = described_turns([(cos, signed_sin)] if by_row else [*zip(cos, signed_sin, strict=True)])
        if not by_row:
            self._cos_sin = cos, signed_sin, cos_sin
        return cos_sin

    def _describe(self, layer: NativeLayer) -> CLayer:
        products = [product.described for product in layer.products]
        products += [CProduct()] * (4 - len(products))
        experts = None if layer.experts is None else self._describe_experts(layer.experts)
        after: list[Any] = [weight for weight, _ in layer.after] or [None, None]
        epsilons = [*layer.epsilons, *(epsilon for _, epsilon in layer.after)] + [0.0] * (2 - len(layer.after))
        norms = map(self._hold, (*layer.norms, layer.head_norm, *after))
        return CLayer(
            *products, experts, *norms, *epsilons, layer.scale, layer.cap, layer.rotary_table, layer.norms_all
        )

    def _describe_experts(self, experts: NativeExperts) -> int:
        """Address of their description."""
        count = len(experts.down)
        weights = [(CProduct * count)(*(one.described for one in each)) for each in (experts.gate_up, experts.down)]
        told = CExperts(experts.router.described, *map(addressof, weights), count, experts.chosen, experts.norm_topk)
        self._held += weights
        self._experts.append((told, experts.chosen))
        return addressof(told)

    def choose_all(self, every: bool) -> None:
        """Whether each row has all experts: for the check at load."""
        for told, chosen in self._experts:
            told.chosen = told.count if every else chosen

    def _hold(self, weight: torch.Tensor | None) -> int | None:
        if weight is None:
            return None
        held = weight.float().contiguous()
        self._held.append(held)
        return held.data_ptr()


class NativeHead:
    """The last norm and a packed head, which the same call runs behind the last layer."""

    def __init__(self, weight: torch.Tensor, epsilon: float, product: PackedWeight) -> None:
        self._norm, self._product = weight.float().contiguous(), product
        self._head = CHead(product.described, self._norm.data_ptr(), epsilon)

    def reading(
        self,
        total: int,
        rows: npt.NDArray[np.int64] | None,
        final: bool,
        top_k: int = 1,
        draws: Mapping[int, tuple[float, int]] | None = None,
    ) -> Reading:
        """Buffers for reading ``total`` rows behind the last layer; ``draws``: rows to draw -> temperature and key."""
        count, dtype = total if rows is None else len(rows), self._product.dtype
        normed = torch.empty(total, self._product.inputs, dtype=dtype, device=HOST) if final else None
        logits = torch.empty(count, self._product.outputs, dtype=dtype, device=HOST) if count else None
        best, address, half = (c_int64 * count)(), address_of(logits), dtype is torch.bfloat16
        wanted = None if rows is None else place_of(rows)
        most = min(top_k, self._product.outputs) if top_k > 1 else 0  # the largest score alone has a cheaper search
        found = (array("q", bytes(8 * count * most)), array("f", bytes(4 * count * most))) if most else None
        stored = None if address is None else Stored(address, count, self._product.outputs, half)
        places = (None, None) if found is None else [own.buffer_info()[0] for own in found]
        by = keys = drawn = None
        if draws and count:
            by, keys, drawn = (c_float * count)(), (c_uint64 * count)(), (c_int64 * count)()
            for place, row in enumerate(range(count) if rows is None else rows.tolist()):
                if row in draws:
                    by[place], keys[place] = draws[row]
        given = (self._head, address_of(normed), wanted, count, address, best, most, *places, by, keys, drawn)
        return Reading(normed, logits, stored, best, drawn, None if found is None else Top(most, *found), given, rows)


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The results of a call behind the last layer.

    Attributes:
        normed: [T, D] all rows after the last norm, or None where they are not asked for.
        logits: [R, V] logits of the rows asked for, or None.
        stored: address of the logits for the library, or None.
        best: [R] token with the largest logit, -1 where a row is not a distribution.
        drawn: [R] drawn tokens, -1 where no draw was made or rounding decides; None where no draws are asked for.
        top: the largest logits, where more than one a row is asked for.
        arguments: the library's arguments for this reading.
        rows: [R] the rows asked for, which they point at; None for all.
    """

    normed: torch.Tensor | None
    logits: torch.Tensor | None
    stored: Stored | None
    best: ctypes.Array[c_int64]
    drawn: ctypes.Array[c_int64] | None
    top: Top | None
    arguments: tuple[Any, ...]
    rows: npt.NDArray[np.int64] | None


_INT = 4  # bytes of a row's parent, and of its depth
_NO_HEAD = (None, None, None, 0, None, None, 0, None, None, None, None, None)


def address_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def described_turns(tables: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> ctypes.Array[CCosSin]:
    """Addresses of rotary tables, cosines and signed sines, which the caller keeps."""
    return (CCosSin * len(tables))(*(CCosSin(one.data_ptr(), other.data_ptr()) for one, other in tables))


def described_rows(step: StepInput, cos_sin: ctypes.Array[CCosSin], *, by_row: bool = False) -> tuple[CRows, list[Any]]:
    """The rows as the library reads them, and what has to be kept until it has done so."""
    keys, described, held = 0, list[int](), list[Any]()
    tree, starts = step.tree, step.starts
    for number, length in enumerate(step.lengths):
        begin, size, rows = tree[number], tree[number + 1] - tree[number], starts[number + 1] - starts[number]
        slots = described_slots(step.texts[number])
        held.append(slots)
        keys = keys if keys > length + size else length + size
        if step.chain[number]:
            above = [*map(addressof, _chain(size))]
        else:
            above = [place_of(step.parents) + _INT * begin, place_of(step.depths) + _INT * begin]
        described += (length, size - rows, rows, *above, addressof(slots))
    blocks = (c_int64 * len(described))(*described)  # six numbers describe a sequence in layers.c
    told = CRows(step.rows, len(held), keys, addressof(blocks), addressof(cos_sin), by_row)
    parts = (c_uint8 * len(step.plan.parts))(*step.plan.parts)
    told.parts = addressof(parts) if step.plan.parts else None
    return told, [*held, blocks, cos_sin, step, parts]


def described_slots(cache: KVCache) -> ctypes.Array[CSlots]:
    """Addresses of a cache's slots in every layer, made anew after they have moved."""
    if cache.described is None:
        layers = zip(cache.keys, cache.values, cache.group_of, strict=True)
        slots = [
            CSlots(k.data_ptr(), v.data_ptr(), group.size, k.shape[2], group.window or 0) for k, v, group in layers
        ]
        cache.described = (CSlots * len(slots))(*slots)
    return cache.described  # type: ignore[no-any-return]


@cache
def _chain(rows: int) -> tuple[ctypes.Array[c_int32], ctypes.Array[c_int32]]:
    """Parents and depths of a chain of rows."""
    return (c_int32 * rows)(*range(-1, rows - 1)), (c_int32 * rows)(*range(rows))
