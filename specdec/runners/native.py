"""The native runner: one call of C runs a step's rows through all layers, on a CPU.

``specdec/native/layers.c`` computes; it streams weights that are stored in panels. The order of a row's sums does not
depend on the other rows, so accepted rows equal plain decoding's bit for bit. That is measured, too, of the compiled
library and of each model (:mod:`specdec.native.invariance`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from specdec.native.invariance import layer_varies, products_vary
from specdec.native.library import library
from specdec.runners.boundary_ops import Joints
from specdec.runners.experts import KnownExperts, PackedExperts
from specdec.runners.known_layers import KnownHead, KnownLayer, gain, gains, in_blocks, is_known_norm, stacked
from specdec.runners.layers import FusedNorm
from specdec.runners.linear import ModuleRef, PackedWeight, TiedEmbedding
from specdec.runners.memory_pages import FilePages, trim_heap
from specdec.runners.native_layers import NativeExperts, NativeHead, NativeLayer, NativeLayers, Reading, runs_heads_of
from specdec.runners.replicas import Evaluated
from specdec.runners.rotary import Rotary
from specdec.runners.rows import Rows
from specdec.runners.runner import FINAL, LayerRunner
from specdec.runners.snapshot import Snapshot
from specdec.sampling.noise import key_at
from specdec.step.cache import KVCache
from specdec.step.slots import LayerSpec
from specdec.step.step_io import StepInput
from specdec.step.step_output import StepOutput

__all__ = ["DTYPES", "NativeRunner", "why_not"]

DTYPES = (torch.float32, torch.bfloat16)
_CHAINS = 4  # so that where results are rounded to bfloat16, some of them differ in what is left
_ROUTED = 32  # rows by which routers are compared
_ROUNDING = 2.0**-7  # of a share, which some routers round to bfloat16


def why_not(layers: Sequence[KnownLayer], head_dim: int) -> str | None:
    """The reason why the library cannot run these layers, with rotary dimension ``head_dim``; None where it can."""
    first = layers[0]
    weight = first.norms[0].weight
    if weight.device.type != "cpu":
        return f"native layers run on a CPU, and the model is on {weight.device}"
    if weight.dtype not in DTYPES:
        return f"native layers compute in float32 and bfloat16, and the model in {str(weight.dtype)[6:]}"
    places = [place.module for layer in layers for group in layer.linears for place in group]
    places += [layer.experts.place.module for layer in layers if layer.experts is not None]
    if any(in_blocks(module) and module.stores[0].dtype is not weight.dtype for module in places):
        return "its blocks were read for another dtype"
    sizes = {(layer.query_heads, layer.key_heads, layer.head_dim, layer.gelu) for layer in layers}
    if len(sizes) > 1:
        return "native layers need all layers to have the same sizes"
    odd = next((layer.inner for layer in layers if not runs_heads_of(first.head_dim, layer.inner)), None)
    if odd is not None or head_dim != first.head_dim:
        return (
            f"native layers need heads of a multiple of 16 values, all of them rotated, and an MLP of a multiple of "
            f"16; here it is {first.head_dim} (of which {head_dim} rotated) and {odd or first.inner}"
        )
    if library() is None:
        return "native layers need a C compiler (cc, gcc or clang), and none works here"
    return None


class NativeRunner(LayerRunner):
    """A model's layers, and its head where that is a plain one.

    With ``owned``, packed weights replace the model's own layer by layer, so that no weight is held twice; otherwise
    they are copies beside the model. ``kinds`` has each layer's attention type, where rotary positions depend on it.
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
        self.layers, self.gelu = packed, layers[0].gelu
        self._native = NativeLayers(packed, gelu=self.gelu)
        self._routers = [layer.experts.router for layer in layers if layer.experts is not None]
        self.experts = _described([layer.experts for layer in packed if layer.experts is not None])
        trim_heap()
        embedding = model.get_input_embeddings()
        self.embed = embedding if isinstance(embedding, TiedEmbedding) else Evaluated(embedding)
        self.head = packed_head or Evaluated(model.get_output_embeddings())
        apart = None if packed_head else "the head is run by its own module, whose products are torch's"
        self.varies = apart or products_vary()
        last = gain(norm)
        self.norm = FusedNorm(norm) if is_known_norm(norm) else Evaluated(norm)
        self._head = None if packed_head is None or last is None else NativeHead(*last, packed_head.packed)
        read = [module for layer in layers for module in layer.module.modules()]
        if head is not None:
            read.append(head.head.module)
        self._like = torch.empty(1, 0, dtype=packed[0].products[0].dtype)  # the hidden states' dtype for rotary modules
        self._embedding = None
        if isinstance(self.embed, TiedEmbedding):
            self._embedding = self.embed.store
            self.looks_up = self.embed.scale is None
            read.append(self.embed)
        self._snapshot = Snapshot(read if last is None else [*read, norm], holders=holders, root=model)
        self._cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None

    def enter(self, rows: Rows) -> torch.Tensor:
        return self.embed.look_up(rows.step.ids) if isinstance(self.embed, TiedEmbedding) else super().enter(rows)

    def run(
        self,
        hidden: torch.Tensor | None,
        rows: Rows,
        first: int,
        last: int,
        taps: Collection[int],
        reading: Reading | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        like = self._like if hidden is None else hidden
        if not self._rotary.fixed:
            angles = self._rotary.of(rows, like)
            cos_sin = angles.cos.float().contiguous(), angles.signed_sin.float().contiguous()
        elif self._cos_sin is None or self._cos_sin[0].shape[1] < rows.end:
            tables = [self._rotary.whole(rows, like, kind) for kind in self._kinds]
            cos, _, signed_sin = (torch.stack(values).float() for values in zip(*tables, strict=True))
            cos_sin = self._cos_sin = cos, signed_sin
        else:
            cos_sin = self._cos_sin
        return self._native.run(
            hidden,
            rows.step,
            *cos_sin,
            first,
            last,
            taps,
            by_row=not self._rotary.fixed,
            reading=reading,
            embedding=self._embedding,
        )

    def finish(self, hidden: torch.Tensor | None, rows: Rows, first: int, last: int, joints: Joints) -> StepOutput:
        if self._head is None or not joints.plain:
            return super().finish(hidden, rows, first, last, joints)
        wanted = rows.step.wanted
        reading = self._head.reading(
            rows.rows, wanted.logits, FINAL in wanted.hidden, wanted.top_k, _first_draws(rows.step)
        )
        hidden, found = self.run(hidden, rows, first, last, wanted.hidden, reading)
        if reading.normed is not None:
            found[FINAL] = reading.normed
        return StepOutput(
            reading.logits,
            wanted.scored,
            out=hidden,
            hidden=found,
            best=reading.best[:],
            drawn=() if reading.drawn is None else reading.drawn[:],
            top=reading.top,
            stored=reading.stored,
        )

    def of(self, layers: list[NativeLayer]) -> NativeRunner:
        """A runner of other layers at the same rotary positions."""
        made = copy.copy(self)
        made.layers, made._native = layers, NativeLayers(layers, gelu=self.gelu)
        return made

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        self._native.choose_all(True)
        try:
            yield
        finally:
            self._native.choose_all(False)

    def misroutes(self) -> str | None:
        """Largest shares of rows are compared; with those of others, which experts have them, as any of equals may."""
        for number, router in enumerate(self._routers):
            generator = torch.Generator().manual_seed(number)
            hidden = torch.randn(_ROUTED, router.weight.shape[1], generator=generator).to(router.weight.dtype)
            logits, shares, _ = Evaluated(router)(hidden)
            own = self._native.shares(number, logits)
            theirs = nn.functional.pad(shares.float().sort(descending=True).values, (0, own.shape[1] - shares.shape[1]))
            if not torch.allclose(own.sort(descending=True).values, theirs, rtol=_ROUNDING, atol=1e-6):
                return f"it chooses otherwise among {own.shape[1]} experts than {type(router).__name__} does"
        return None

    def measure_rows(self, specs: Sequence[LayerSpec]) -> None:
        if self.varies is None:
            self.varies = layer_varies(partial(self._chain, specs))

    def _chain(self, specs: Sequence[LayerSpec], counts: Sequence[int]) -> torch.Tensor:
        """[N, D] random rows of several chains through the last layer, in blocks of these numbers of rows."""
        last, total, found = len(self.layers) - 1, sum(counts), []
        for seed in range(_CHAINS):
            generator = torch.Generator().manual_seed(seed)
            hidden = torch.randn(total, len(self.layers[last].norms[0]), generator=generator).to(self._like.dtype)
            cache = KVCache(specs, capacity=total, rows=total)
            for part in torch.split(hidden, [*counts]):
                rows = Rows(StepInput.of(cache, [0] * len(part)))
                found.append(self.run(part, rows, last, last + 1, ())[0])
                cache.commit(range(len(part)))
        return torch.cat(found)

    @property
    def weights(self) -> list[PackedWeight] | None:
        """What a forward reads once, head included; None where it reads a part of it, or the head is torch's."""
        head = self.head
        if self.experts is not None or not isinstance(head, _PackedHead):
            return None
        return [*(weight for layer in self.layers for weight in layer.products), head.packed]

    def changed(self) -> str | None:
        return self._snapshot.changed()


def _first_draws(step: StepInput) -> Mapping[int, tuple[float, int]]:
    """Temperature and key of the draw behind the first row of each sequence; the others are made along the path."""
    draws = step.wanted.draws
    if draws is None:
        return {}
    each = zip(step.starts, draws.start, draws.temperature, step.lengths, strict=False)
    return {row: (by, key_at(start, length + 1)) for row, start, by, length in each if by}


def _pack_layer(layer: KnownLayer, files: FilePages | None, rotary_table: int) -> NativeLayer:
    """The layer's weights in panels; with ``files``, they replace its own. ``rotary_table`` is its table's index."""
    products: list[PackedWeight] = []
    for places in layer.linears:
        if (store := _store_of(places)) is not None:
            products.append(store)
            continue
        weights = [place.module.weight.data for place in places]
        packed = PackedWeight(*stacked(places))
        if files is not None:
            packed.install(places)
            files.release(weights)
        products.append(packed)
        del weights
    experts = None if layer.experts is None else _pack_experts(layer.experts, files)
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
        rotary_table,
        experts,
        layer.norms_all,
    )


def _pack_experts(known: KnownExperts, files: FilePages | None) -> NativeExperts:
    """A layer's experts in panels; with ``files``, they replace its own. The router, which is small, is copied."""
    gate_up, down = known.weights()
    module = known.place.module
    if files is not None and not isinstance(module, PackedExperts):
        known.place.put(PackedExperts(gate_up, down, module))
        files.release([weight.data for weight in module.parameters()])
    return NativeExperts(PackedWeight(known.router.weight.data), gate_up, down, known.chosen, known.norm_topk)


def _described(experts: Sequence[NativeExperts]) -> str | None:
    """How many there are, and how much of their weights a row reads."""
    if not experts:
        return None
    sizes = {(one.chosen, len(one.down)) for one in experts}
    counts = " or ".join(f"{chosen} of {count}" for chosen, count in sorted(sizes))
    whole = [sum(store.nbytes for store in (*one.gate_up, *one.down)) for one in experts]
    read = sum(size * one.chosen / len(one.down) for size, one in zip(whole, experts, strict=True))
    return (
        f"in the same call: {counts} a row in {len(experts)} layers, which reads {read / 1e6:.0f} of their "
        f"{sum(whole) / 1e6:.0f} MB; rows share an expert's reading"
    )


def _store_of(places: Sequence[ModuleRef]) -> PackedWeight | None:
    """The packed weight that holds these linears in this order; None where they are not parts of one."""
    modules = [place.module for place in places]
    if not all(map(in_blocks, modules)):
        return None
    store: PackedWeight = modules[0].store
    ends = [0, *(module.rows.stop for module in modules)]
    whole = ends[-1] == store.outputs and [module.rows.start for module in modules] == ends[:-1]
    return store if whole and all(module.store is store for module in modules) else None


def _pack_head(head: KnownHead, files: FilePages | None) -> _PackedHead | None:
    """A head's weight in panels; with ``files``, it replaces the head's, and that of an embedding that shares it."""
    linear = head.head.module
    if in_blocks(linear):
        return _PackedHead(linear.store, linear) if linear.out_features == linear.store.outputs else None
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
    """A packed head. Where gradients are needed, the model's own head computes, as the library has no gradients."""

    def __init__(self, packed: PackedWeight, module: Any) -> None:
        self.packed, self._module = packed, module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.requires_grad:
            logits: torch.Tensor = self._module(hidden)
            return logits
        return self.packed(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)
