"""NativeExecutor: a decoder in one call of C, by its spec, on a CPU.

Weights are stored in panels, one layer at a time, and nothing of a checkpoint stays beside them. The order of a row's
sums does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from specdec.decoder.spec import Attention, DecoderSpec, Embedding, Experts, Gated, Head, Layer, Mlp, Norm
from specdec.decoder.weights.checkpoint import Checkpoint
from specdec.execute.knobs import unlike
from specdec.execute.layer import GatedWeights, LayerWeights
from specdec.execute.torch import TorchExecutor
from specdec.execute.weights import DecoderWeights
from specdec.native.invariance import layer_varies, products_vary
from specdec.native.library import library
from specdec.runners.linear import PackedWeight
from specdec.runners.native_layers import NativeExperts, NativeHead, NativeLayer, NativeLayers, runs_heads_of
from specdec.runners.sent_rows import rows_on
from specdec.sampling.noise import key_at
from specdec.step.step_io import FINAL, StepInput
from specdec.step.step_output import StepOutput

__all__ = ["NativeExecutor", "native_layer", "why_not"]

_DTYPES = (torch.float32, torch.bfloat16)
_CHAINS = 4  # so that where results are rounded to bfloat16, some of them differ in what is left


def why_not(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why the library cannot run a decoder; None where it can."""
    if device.type != "cpu":
        return f"native layers run on a CPU, and the model is on {device}"
    if dtype not in _DTYPES:
        return f"native layers compute in float32 and bfloat16, and the model in {str(dtype)[6:]}"
    if others := sorted({type(own.mixer).__name__ for own in spec.layers} - {Attention.__name__}):
        return f"native layers compute attention, and no {others[0]}"
    if why := unlike(spec, _computed(spec), "native layers compute decoders like Llama's, Gemma's and Mixtral's"):
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
    if library() is None:
        return "native layers need a C compiler (cc, gcc or clang), and none works here"
    return None


def _computed(spec: DecoderSpec) -> DecoderSpec:
    """What the library makes of a decoder: all that it does not compute is at its default."""
    layers = {own: _computed_layer(own) for own in {*spec.layers}}
    head = Head(_computed_norm(spec.head.norm), spec.head.tied, spec.head.cap)
    every, ends = tuple(layers[own] for own in spec.layers), (Embedding(spec.embedding.scale), head)
    return DecoderSpec(spec.architecture, spec.vocab, spec.hidden, spec.context, every, *ends)


def _computed_layer(layer: Layer) -> Layer:
    own, mlp = layer.attention, layer.mlp
    attention = Attention(
        own.heads,
        own.kv_heads,
        own.head_dim,
        own.scale,
        replace(own.rope, dim=own.head_dim),
        own.window,
        own.cap,
        own.qk_norm and _computed_norm(own.qk_norm),
        own.norms_all,
        own.bias,
    )
    computed: Mlp = Gated(mlp.act, mlp.width, not isinstance(mlp, Experts) and mlp.bias)
    if isinstance(mlp, Experts):
        computed = Experts(mlp.act, mlp.width, mlp.count, mlp.chosen, mlp.norm)
    first, second = (_computed_norm(norm or Norm(1.0)) for norm in layer.before)
    after = layer.after and (_computed_norm(layer.after[0]), _computed_norm(layer.after[1]))
    return Layer(attention, computed, (first, second), after)


def _computed_norm(norm: Norm) -> Norm:
    return Norm(norm.eps, norm.offset, norm.rounds_first)


class NativeExecutor(TorchExecutor):
    """As :class:`TorchExecutor`, for what ``why_not`` does not rule out.

    Quantised weights stay in their blocks. ``int8``: rows that these are multiplied with are rounded to bytes.
    """

    name = "native"

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, int8: bool = False) -> None:
        self._int8 = int8
        super().__init__(checkpoint, dtype=dtype, device=torch.device("cpu"))
        spec, ropes = self.spec, self.spec.ropes
        layers = [
            native_layer(own, weights, ropes.index(own.attention.rope))
            for own, weights in zip(spec.layers, self._weights.layers, strict=True)
        ]
        self._gelu = spec.layers[0].mlp.act == "gelu_tanh"
        self._native = NativeLayers(layers, gelu=self._gelu)
        head, norm = self._weights.head, self._weights.norm
        assert isinstance(head, PackedWeight)
        self._head = NativeHead(norm.by, norm.norm.eps, head)
        self._laid = layers
        self.varies = products_vary()
        self.experts = _told([one.experts for one in layers if one.experts is not None])
        self._turns: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def weights(self) -> list[PackedWeight] | None:
        """What a forward reads once, head included; None where it reads a part of it."""
        if self.experts is not None:
            return None
        assert isinstance(self._weights.head, PackedWeight)
        return [*(weight for layer in self._laid for weight in layer.products), self._weights.head]

    def measure_rows(self) -> None:
        if self.varies is None:
            self.varies = layer_varies(self._chain)

    def _chain(self, counts: Sequence[int]) -> torch.Tensor:
        """[N, D] random rows of several chains through the last layer, in forwards of these numbers of rows."""
        last, total, found = len(self.spec.layers) - 1, sum(counts), []
        for seed in range(_CHAINS):
            generator = torch.Generator().manual_seed(seed)
            hidden = torch.randn(total, self.spec.hidden, generator=generator).to(self.dtype)
            cache = self.new_cache(capacity=total, rows=total)
            for part in torch.split(hidden, [*counts]):
                step = StepInput.of(cache, [0] * len(part))
                turns = self._turned(step.end)
                found.append(self._native.run(part, step, *turns, last, last + 1, (), by_row=False)[0])
                cache.commit(range(len(part)))
        return torch.cat(found)

    def _read(self, checkpoint: Checkpoint) -> DecoderWeights:
        return DecoderWeights(checkpoint, self.dtype, self.device, PackedWeight, int8=self._int8)

    def attention(self) -> str:
        return "in the same call"

    def _run(self, step: StepInput, first: int, last: int, hidden: torch.Tensor | None) -> StepOutput:
        wanted, rows, table = step.wanted, rows_on(self.device, step, self.backend), self._weights.embedding
        looks_up = isinstance(table, PackedWeight) and self.spec.embedding.scale == 1.0
        if hidden is None and not looks_up:
            hidden = self.embed(step.ids)
        whole, reading = last == len(self.spec.layers), None
        if whole and not self.spec.head.cap:
            draws = _first_draws(step)
            reading = self._head.reading(step.rows, wanted.logits, FINAL in wanted.hidden, wanted.top_k, draws)
        embedding = table if isinstance(table, PackedWeight) else None
        turns = self._turned(step.end)
        hidden, found = self._native.run(
            hidden, step, *turns, first, last, wanted.hidden, by_row=False, reading=reading, embedding=embedding
        )
        if reading is None:
            return self._finished(rows, last, hidden, found)
        if last in wanted.hidden:
            found[last] = hidden
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
            sent=rows,
        )

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        self._native.choose_all(True)
        try:
            with super().every_expert():
                yield
        finally:
            self._native.choose_all(False)

    def _turned(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[K, positions, d] float32 cosines and signed sines of the decoder's K kinds of positions."""
        if self._turns is None or self._turns[0].shape[1] < end:
            tables = [self._ropes.whole(rope, end) for rope in self.spec.ropes]
            cos, signed_sin = (torch.stack(values).float() for values in zip(*tables, strict=True))
            self._turns = cos, signed_sin
        return self._turns


def _first_draws(step: StepInput) -> Mapping[int, tuple[float, int]]:
    """Temperature and key of the draw behind the first row of each sequence; the others are made along the path."""
    draws = step.wanted.draws
    if draws is None:
        return {}
    each = zip(step.starts, draws.start, draws.temperature, step.lengths, strict=False)
    return {row: (by, key_at(start, length + 1)) for row, start, by, length in each if by}


def _told(experts: Sequence[NativeExperts]) -> str | None:
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


def native_layer(own: Layer, weights: LayerWeights, table: int = 0) -> NativeLayer:
    """A layer of packed products as the library reads it; ``table``: the index of its rotary positions."""
    attention, mlp = own.attention, weights.mlp
    products: Any = (weights.qkv, weights.out)
    norms: Any = (*weights.before, *(weights.after if own.after and weights.after else ()))
    first, second, *after = norms
    if isinstance(mlp, GatedWeights):
        products += (mlp.gate_up, mlp.down)
    epsilons = [0.0 if norm is None else norm.eps for norm in (*own.before, attention.qk_norm)]
    return NativeLayer(
        products,
        (None if first is None else first.by, second.by),
        (epsilons[0], epsilons[1], epsilons[2]),
        (attention.heads, attention.kv_heads),
        attention.head_dim,
        attention.scale,
        weights.heads,
        [(norm.by, norm.norm.eps) for norm in after],
        attention.cap,
        table,
        _described_experts(own.mlp, mlp) if isinstance(own.mlp, Experts) else None,
        attention.norms_all,
    )


def _described_experts(own: Experts, weights: Any) -> NativeExperts:
    gate_up, down = [one.gate_up for one in weights.each], [one.down for one in weights.each]
    return NativeExperts(weights.router, gate_up, down, own.chosen, own.norm)
