"""What the native library reads of a decoder's layers, made when it is loaded; and which decoders it runs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof
from typing import Any

import torch

from specdec.decoder.rope import RopeTables
from specdec.decoder.spec import Attention, DecoderSpec, Experts, Layer, Rope
from specdec.execute.knobs import LIKE_LLAMA, unlike
from specdec.execute.layer import ExpertWeights, GatedWeights, LayerWeights
from specdec.native.library import library
from specdec.native.types import CCosSin, CExperts, CLayer, CProduct, CShape
from specdec.runners.linear import PackedWeight, why_not_packed

__all__ = ["NativeLayers", "Turns", "address_of", "runs_heads_of", "why_not"]

_KNOWN = LIKE_LLAMA | {
    *("Experts", "Attention.cap", "Attention.norms_all", "Norm.offset", "Norm.rounds_first"),
    *("Layer.after", "Embedding.scale", "Head.cap", "Head.bias", "gelu", "gelu_tanh", "relu"),
}  # fmt: skip


def why_not(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why the library cannot run a decoder; None where it can."""
    if why := why_not_packed(dtype, device):
        return why
    if others := sorted({type(own.mixer).__name__ for own in spec.layers} - {Attention.__name__}):
        return f"native layers compute attention, and no {others[0]}"
    if why := unlike(spec, _KNOWN, "native layers compute decoders like Llama's, Gemma's and Mixtral's"):
        return why
    if len({(own.heads, own.kv_heads, own.head_dim) for own in (layer.attention for layer in spec.layers)}) > 1:
        return "native layers need all layers to have the same heads"
    if len(acts := {layer.mlp.act for layer in spec.layers}) > 1:
        return "native layers need all layers to have the same activation"
    if not acts <= {"silu", "gelu_tanh"}:
        return f"native layers have SiLU or GELU in its tanh form, and here it is {acts.pop()}"
    head_dim, widths = spec.layers[0].attention.head_dim, {layer.mlp.width for layer in spec.layers}
    if not all(runs_heads_of(head_dim, width) for width in widths):
        return (
            f"native layers need heads and MLPs of a multiple of 16, and here they are {head_dim} and "
            f"{', '.join(map(str, sorted(widths)))} wide"
        )
    return None


def runs_heads_of(head_dim: int, inner: int) -> bool:
    """Whether the library has code for this head dimension and MLP width."""
    return head_dim % 16 == 0 and inner % 16 == 0


def address_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeLayers:
    """Layers of equal sizes, but for the widths of their MLPs, as the library reads them while this object lives.

    Args:
        layers: what each computes.
        weights: by what; all products are packed.
        ropes: kinds of positions, in the order of their tables; none where there is one table for all layers.

    Attributes:
        shape: their sizes.
        layers: of each its structure.
        dtype: of what they compute.
        products: all that a row reads, whichever experts it has.
        experts: how many experts a row reads, as text; None where there are none.
    """

    def __init__(self, layers: Sequence[Layer], weights: Sequence[LayerWeights], ropes: Sequence[Rope] = ()) -> None:
        self._held: list[Any] = []  # the library reads these by address
        self._experts: list[tuple[CExperts, Experts]] = []
        self.products: list[PackedWeight] = []
        each = zip(layers, weights, strict=True)
        described = [self._layer(own, by, ropes.index(own.attention.rope) if ropes else 0) for own, by in each]
        self.layers = (CLayer * len(layers))(*described)
        attention, mlps, self.dtype = layers[0].attention, [own.mlp for own in layers], self.products[0].dtype
        self.shape = CShape(
            hidden=self.products[1].outputs,
            query_heads=attention.heads,
            key_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            inner=max(mlp.width for mlp in mlps),
            experts=max(mlp.count if isinstance(mlp, Experts) else 0 for mlp in mlps),
            half=self.dtype is torch.bfloat16,
            gelu=mlps[0].act == "gelu_tanh",
            tiles=library().specdec_tiles(),
        )
        self.experts = _told([by.mlp for by in weights], [own for _, own in self._experts])

    def _layer(self, own: Layer, weights: Any, table: int) -> CLayer:
        attention, mlp, after = own.attention, weights.mlp, weights.after if own.after else None
        named: dict[str, Any] = {"qkv": weights.qkv, "out": weights.out}
        if isinstance(mlp, GatedWeights):
            named |= {"gate_up": mlp.gate_up, "down": mlp.down}
        self.products += named.values()
        described = CLayer(
            **{name: product.described for name, product in named.items()},
            head_norm=None if weights.heads is None else self._place(weights.heads),
            head_epsilon=0.0 if attention.qk_norm is None else attention.qk_norm.eps,
            scale=attention.scale,
            cap=attention.cap,
            turns=table,
            norms_all=attention.norms_all,
        )
        names, norms = ("first", "second", "out", "down"), (*weights.before, *(after or ()))
        for name, norm in zip(names, norms, strict=False):
            if norm is not None:
                setattr(described, f"{name}_norm", self._place(norm.by))
                setattr(described, f"{name}_epsilon", norm.norm.eps)
        if isinstance(own.mlp, Experts):
            described.experts = self._described_experts(own.mlp, mlp)
        self._held.append(weights)
        return described

    def _described_experts(self, own: Experts, weights: ExpertWeights) -> int:
        """Address of their structure."""
        router: Any = weights.router
        parts: Any = [[one.gate_up for one in weights.each], [one.down for one in weights.each]]
        arrays = [(CProduct * own.count)(*(one.described for one in part)) for part in parts]
        told = CExperts(router.described, *map(addressof, arrays), own.count, own.chosen, own.norm)
        self._held += arrays
        self._experts.append((told, own))
        return addressof(told)

    def choose_all(self, every: bool) -> None:
        """Whether each row has all experts: for the check at load."""
        for told, own in self._experts:
            told.chosen = own.count if every else own.chosen

    def _place(self, weight: torch.Tensor) -> int:
        """Address of a copy in float32."""
        self._held.append(weight.float().contiguous())
        address: int = self._held[-1].data_ptr()
        return address


class Turns:
    """Tables of rotary positions 0, 1, 2, ... in float32 as the library reads them, as long as they were asked for.

    Args:
        tables: makes them, in the dtype that they are rounded to.
        ropes: the kinds of positions.

    Attributes:
        known: how many positions there are, and the addresses of the tables by kind, valid while this object is; both
            at once, as threads share them.
    """

    def __init__(self, tables: RopeTables, ropes: Sequence[Rope]) -> None:
        self._tables, self._ropes = tables, ropes
        self.known: tuple[int, ctypes.Array[CCosSin]] = (0, (CCosSin * 0)())
        self._held: list[Any] = []  # another thread may still read shorter ones

    def reach(self, end: int) -> ctypes.Array[CCosSin]:
        """The addresses, of positions 0 to ``end`` - 1 or more."""
        known, described = self.known
        if known < end:
            pairs = [self._tables.whole(rope, end) for rope in self._ropes]
            whole = [[values.float().contiguous() for values in pair] for pair in pairs]
            described = (CCosSin * len(whole))(*(CCosSin(*(one.data_ptr() for one in pair)) for pair in whole))
            self._held += [whole, described]
            self.known = min(len(cos) for cos, _ in whole), described
        return described


def _told(mlps: Sequence[Any], experts: Sequence[Experts]) -> str | None:
    """How many experts there are, and how much of their weights a row reads."""
    if not experts:
        return None
    kinds = [f"{chosen} of {count}" for chosen, count in sorted({(own.chosen, own.count) for own in experts})]
    every: list[Any] = [own.each for own in mlps if isinstance(own, ExpertWeights)]
    sizes: list[int] = [sum(one.gate_up.nbytes + one.down.nbytes for one in own) for own in every]
    read = sum(size * own.chosen / own.count for size, own in zip(sizes, experts, strict=True))
    return (
        f"in the same call: {' or '.join(kinds)} a row in {len(experts)} layers, which reads {read / 1e6:.0f} of their "
        f"{sum(sizes) / 1e6:.0f} MB; rows share an expert's reading"
    )
