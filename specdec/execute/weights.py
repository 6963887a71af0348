"""Weights of a decoder as an executor multiplies by them, read from a checkpoint one layer at a time.

What shares an input is stacked, in a copy whose pages of the file are released. What stands alone and needs no other
layout stays mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from specdec.decoder.names import CHOICE, FUSED, Weight
from specdec.decoder.spec import Attention, Experts, Norm, Plain
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.execute.layer import ExpertWeights, GatedWeights, LayerWeights, PlainWeights
from specdec.execute.norm import LayerNorm, RmsNorm
from specdec.runners.block_weight import BlockWeight
from specdec.runners.linear import DenseLinear, PackedWeight
from specdec.runners.memory_pages import trim_heap

__all__ = ["DecoderWeights", "Kernel", "LayersWeights", "bias_of", "look_up", "rows_of"]

Kernel = DenseLinear | PackedWeight
_QKV = ("attention.q", "attention.k", "attention.v")


def bias_of(kernel: Kernel, rows: range | torch.Tensor) -> torch.Tensor | None:
    """[n] the bias of these rows of a product; None where it has none."""
    if kernel.bias is None:
        return None
    return kernel.bias[slice(rows.start, rows.stop) if isinstance(rows, range) else rows.to(kernel.bias.device)]


def look_up(table: torch.Tensor | PackedWeight, tokens: torch.Tensor) -> torch.Tensor:
    """[T, D] the rows of a table for tokens [T], on its device."""
    return table.look_up(tokens.tolist()) if isinstance(table, PackedWeight) else F.embedding(tokens, table)


def rows_of(kernel: Kernel, rows: range | torch.Tensor) -> torch.Tensor:
    """[n, in] these rows of what a product multiplies by; of a dense one's range a view."""
    if isinstance(kernel, PackedWeight):
        return kernel.look_up(rows if isinstance(rows, range) else rows.tolist())
    return kernel.weight[slice(rows.start, rows.stop) if isinstance(rows, range) else rows.to(kernel.weight.device)]


class LayersWeights:
    """The weights of layers, and of what a drafter has around them.

    Args:
        checkpoint: where they are.
        dtype, device: of the computation.
        kernel: makes a product of a weight [out, in] and a bias; what packs weights keeps none of the originals, and
            leaves quantised ones in their blocks.
        int8: rows that blocks are multiplied with are rounded to bytes.

    Attributes:
        layers: of each layer.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Callable[[torch.Tensor, torch.Tensor | None], Kernel] = DenseLinear,
        *,
        int8: bool = False,
    ) -> None:
        self._checkpoint, self._dtype, self._device, self._kernel = checkpoint, dtype, device, kernel
        self._int8 = int8
        self._packs = kernel is PackedWeight
        self._named = dict[Weight, Callable[[], torch.Tensor]]()
        self._kernels = list[tuple[tuple[Weight, ...], Kernel]]()
        self._own = checkpoint.names.own
        self.read_others()
        self.layers = [self._layer(number) for number in range(len(checkpoint.spec.layers))]
        del self._checkpoint  # and with it a live model's weights, or open files

    def read_others(self) -> None:
        """Read what there is beside the layers."""

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as transformers has them, sorted by its names; what is packed or fused is made in turn."""
        every = self._named.items()
        own = dict[str, list[Callable[[], torch.Tensor]]]()
        for weight, made in every:
            if weight.expert is None:
                own.setdefault(self._own(weight), []).append(made)
        for name in sorted(own):
            parts = [made() for made in own[name]]
            yield name, parts[0] if len(parts) == 1 else torch.cat(parts)

    def kernels(self) -> Iterator[tuple[list[str], Kernel]]:
        """Every product, and a table in blocks, with transformers' names of the weights in it."""
        return ((list(dict.fromkeys(map(self._own, weights))), kernel) for weights, kernel in self._kernels)

    def _layer(self, number: int) -> LayerWeights:
        spec = self._checkpoint.spec.layers[number]
        sides = _sides(spec.before)
        before = [
            None if norm is None else self.read_norm(norm, Weight(f"before.{own}", number)) for norm, own in sides
        ]
        after = [
            self.read_norm(norm, Weight(f"after.{part}", number)) for norm, part in _sides(spec.after or ()) if norm
        ]
        attends = isinstance(spec.mixer, Attention)
        products = (_QKV, ("attention.o",)) if attends else (("conv.in",), ("conv.out",))
        qkv, out = (self.read_product(*(Weight(part, number) for part in own)) for own in products)
        mlp: GatedWeights | PlainWeights | ExpertWeights
        if isinstance(spec.mlp, Experts):
            mlp = self._mixture(number, spec.mlp)
        elif isinstance(spec.mlp, Plain):
            mlp = PlainWeights(*(self.read_product(Weight(f"mlp.{part}", number)) for part in ("up", "down")))
        else:
            mlp = self._gated("mlp", number)
        trim_heap()
        both = (before[0], before[1]), (after[0], after[1]) if after else None
        heads, taps = (self._heads(number, spec.attention), None) if attends else (None, self._taps(number))
        sinks = Weight("attention.sinks", number, kind="") if attends and spec.attention.sinks else None
        return LayerWeights(*both, qkv, out, heads, mlp, taps, None if sinks is None else self._alone(sinks))

    def _gated(self, part: str, number: int) -> GatedWeights:
        gate_up = self.read_product(Weight(f"{part}.gate", number), Weight(f"{part}.up", number))
        return GatedWeights(gate_up, self.read_product(Weight(f"{part}.down", number)))

    def _mixture(self, number: int, own: Experts) -> ExpertWeights:
        place = Weight("experts.router", number)
        if own.router is None:
            router, bias = self.read_product(place), None
        else:
            full = torch.promote_types(self._dtype, torch.float32)
            router = self._kernel(self._alone(place).to(full), None)
            bias = self._checkpoint.read(place._replace(kind=CHOICE)).to(self._device, full)
        each = self._experts(number)
        shared = self._gated("shared", number) if own.shared else None
        gate = self.read_product(Weight("shared.router", number)) if own.shared_gate else None
        return ExpertWeights(router, each, bias, shared, gate)

    def read_norm(self, norm: Norm, weight: Weight) -> RmsNorm | LayerNorm:
        """A norm by this weight."""
        by = self._alone(weight)
        if not norm.centred:
            return RmsNorm(norm, by)
        return LayerNorm(norm, by, self._alone(weight._replace(kind="bias")) if norm.bias else None)

    def _alone(self, weight: Weight) -> torch.Tensor:
        """A tensor that nothing is multiplied by as a matrix."""
        found = self._stacked([self._checkpoint.read(weight)])
        self._named[weight] = partial(self._checkpoint.as_named(weight), found)
        return found

    def read_table(self, weight: Weight) -> torch.Tensor | PackedWeight:
        """A table that is looked up; one in quantised blocks stays in its file."""
        if not self._packs or (blocks := self._checkpoint.blocks(weight)) is None:
            return self._alone(weight)
        table = BlockWeight([blocks], None, self._dtype, as_in_file=True, int8=self._int8)
        self._named[weight] = partial(rows_of, table, range(table.outputs))
        self._kernels.append(((weight,), table))
        return table

    def read_product(self, *weights: Weight) -> Kernel:
        """The product by these weights, one above the other."""
        biases = [own for weight in weights if self._checkpoint.has(own := _bias_of(weight))]
        bias = self._optional([*map(self._checkpoint.read, biases)])
        blocks = self._in_blocks(weights, bias) if len(biases) in (0, len(weights)) else None
        kernel = blocks or self._made([*map(self._checkpoint.read, weights)], bias)
        self._kernels.append((weights, kernel))
        start = 0
        for weight in weights:
            stop = start + self._checkpoint.shapes[weight][0]
            back = self._checkpoint.as_named(weight)
            self._named[weight] = partial(_part, kernel, range(start, stop), back)
            if bias is not None:
                self._named[_bias_of(weight)] = partial(back, bias[start:stop])
            start = stop
        return kernel

    def _in_blocks(self, weights: Sequence[Weight], bias: torch.Tensor | None) -> BlockWeight | None:
        """The product by weights that are all in quantised blocks; None where some are not, or are to be dense."""
        if not self._packs:
            return None
        blocks = [found for weight in weights if (found := self._checkpoint.blocks(weight)) is not None]
        return BlockWeight(blocks, bias, self._dtype, int8=self._int8) if len(blocks) == len(weights) else None

    def _made(self, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Kernel:
        first = tensors[0]
        as_it_is = self._packs and len(tensors) == 1 and first.dtype is self._dtype  # which is copied anyhow
        kernel = self._kernel(first if as_it_is else self._stacked(tensors), bias)
        if isinstance(kernel, PackedWeight):
            self._checkpoint.release(tensors)
        return kernel

    def _experts(self, number: int) -> Sequence[GatedWeights]:
        each = []
        for part, parts in FUSED.items():
            if self._packs_experts(number):
                count = range(self._checkpoint.experts_in(number))
                own = [self.read_product(*(Weight(one, number, expert) for one in parts)) for expert in count]
            else:
                biases = self._checkpoint.experts(number, part, "bias")
                weights = self._checkpoint.experts(number, part)
                own = [self._made(tensors, self._optional(next(biases, ()))) for tensors in weights]
                every = enumerate(own)
                self._kernels += [(tuple(Weight(one, number, expert) for one in parts), made) for expert, made in every]
            back = self._checkpoint.as_named(Weight(part, number))
            self._named[Weight(part, number)] = partial(_fused, own, back)
            if all(one.bias is not None for one in own):
                self._named[Weight(part, number, kind="bias")] = partial(_fused_biases, own, back)
            each.append(own)
        return [GatedWeights(gate_up, down) for gate_up, down in zip(*each, strict=True)]

    def _packs_experts(self, number: int) -> bool:
        """Whether a layer's experts are in quantised blocks, all of their parts, and are to stay so."""
        first = [Weight(part, number, 0) for parts in FUSED.values() for part in parts]
        if not self._packs or not all(map(self._checkpoint.has, first)):
            return False
        return all(self._checkpoint.blocks(weight) is not None for weight in first)

    def _taps(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[W, D] and [D] what a convolution multiplies by and adds, in float32 at least."""
        weight = Weight("conv.taps", number)
        bias = self._alone(own) if self._checkpoint.has(own := weight._replace(kind="bias")) else None
        wide = torch.promote_types(self._dtype, torch.float32)
        taps = self._alone(weight)[:, 0].t().to(wide).contiguous()
        return taps, None if bias is None else bias.to(wide)

    def _heads(self, number: int, own: Attention) -> torch.Tensor | None:
        """[H + G, 1, d] what queries and keys are multiplied by when they are normed."""
        if own.qk_norm is None:
            return None
        query, key = (self._alone(Weight(f"attention.{one}_norm", number)) for one in "qk")
        if own.norms_all or own.norms_own:
            return torch.cat([query, key]).view(-1, 1, own.head_dim)
        stacked = torch.stack([query] * own.heads + [key] * own.kv_heads).unsqueeze(1)
        offset = own.qk_norm.offset
        return stacked.to(torch.promote_types(stacked.dtype, torch.float32)) + offset if offset else stacked

    def _optional(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """As ``_stacked``; None of none."""
        return self._stacked(tensors) if tensors else None

    def _stacked(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of them, one above the other, in the decoder's dtype and on its device."""
        first = tensors[0]
        rows = sum(map(len, tensors))
        found = torch.empty(rows, *first.shape[1:], dtype=self._dtype, device=self._device)
        start = 0
        for tensor in tensors:
            found[start : start + len(tensor)].copy_(tensor)
            start += len(tensor)
        self._checkpoint.release(tensors)
        return found


class DecoderWeights(LayersWeights):
    """All weights of a decoder.

    Attributes:
        head: from [T, D] to logits.
        embedding: [V, D] a table, or where they are tied and packed, the head.
        norm: the last norm.
    """

    def read_others(self) -> None:
        tied, norm = self._checkpoint.spec.head.tied, self._checkpoint.spec.head.norm
        self.head = self.read_product(Weight("embedding" if tied else "head"))
        self.embedding: torch.Tensor | PackedWeight
        if not tied:
            self.embedding = self.read_table(Weight("embedding"))
        else:
            self.embedding = self.head.weight if isinstance(self.head, DenseLinear) else self.head
        self.norm = self.read_norm(norm, Weight("norm"))


def _bias_of(weight: Weight) -> Weight:
    """The bias of its product; an embedding is multiplied by where the head is tied to it."""
    return weight._replace(part="head" if weight.part == "embedding" else weight.part, kind="bias")


def _sides(norms: Sequence[Norm | None]) -> Iterator[tuple[Norm | None, str]]:
    return zip(norms, ("attention", "mlp"), strict=False)


def _part(kernel: Kernel, rows: range, back: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return back(rows_of(kernel, rows))


def _fused(kernels: Sequence[Kernel], back: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What products of experts multiply by, as transformers has it; ``back``: makes it of [E, out, in]."""
    sizes = [len(one.weight) if isinstance(one, DenseLinear) else one.outputs for one in kernels]
    return back(torch.stack([rows_of(one, range(size)) for one, size in zip(kernels, sizes, strict=True)]))


def _fused_biases(kernels: Sequence[Kernel], back: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Their biases, likewise of [E, out]."""
    return back(torch.stack([one.bias for one in kernels if one.bias is not None]))
