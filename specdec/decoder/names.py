"""Names: what a family's tensors are called, in checkpoints and by transformers.

A weight is known by its part of the decoder, such as ``attention.q``, and the layer; ``shapes_of`` lists what a decoder
has. A table says what the module of each part is called, by several patterns where checkpoints differ; the first is
transformers' own. Experts are one by one in checkpoints, and fused in transformers' modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.decoder.spec import Attention, DecoderSpec, Experts, Layer, Norm, Plain, ShortConv

__all__ = ["CHOICE", "DECODER", "EXPERTS", "FUSED", "Names", "Weight", "shapes_of"]

Shape = tuple[int, ...]


class Weight(NamedTuple):
    """A tensor of a decoder: of which part, layer and expert; ``kind`` is ``weight``, ``bias``, ``CHOICE`` or empty
    where a part is the whole name.
    """

    part: str
    layer: int | None = None
    expert: int | None = None
    kind: str = "weight"


CHOICE = "e_score_correction_bias"
"""Kind of a router's bias, which no share of an expert has; to transformers it is a buffer and no parameter."""

FUSED: Mapping[str, tuple[str, ...]] = {
    "experts.gate_up": ("experts.gate", "experts.up"),
    "experts.down": ("experts.down",),
}
"""Tensor of all experts [E, outputs, inputs] -> the parts of one expert that are stacked in it."""

DECODER: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embed_tokens",),
    "norm": ("norm",),
    "before.attention": ("layers.{layer}.input_layernorm",),
    "attention.q": ("layers.{layer}.self_attn.q_proj",),
    "attention.k": ("layers.{layer}.self_attn.k_proj",),
    "attention.v": ("layers.{layer}.self_attn.v_proj",),
    "attention.o": ("layers.{layer}.self_attn.o_proj",),
    "attention.q_norm": ("layers.{layer}.self_attn.q_norm",),
    "attention.k_norm": ("layers.{layer}.self_attn.k_norm",),
    "attention.sinks": ("layers.{layer}.self_attn.sinks",),
    "conv.in": ("layers.{layer}.conv.in_proj",),
    "conv.taps": ("layers.{layer}.conv.conv",),
    "conv.out": ("layers.{layer}.conv.out_proj",),
    "before.mlp": ("layers.{layer}.post_attention_layernorm",),
    "mlp.gate": ("layers.{layer}.mlp.gate_proj",),
    "mlp.up": ("layers.{layer}.mlp.up_proj",),
    "mlp.down": ("layers.{layer}.mlp.down_proj",),
    "experts.router": ("layers.{layer}.mlp.gate",),
    "experts.gate": ("layers.{layer}.mlp.experts.{expert}.gate_proj",),
    "experts.up": ("layers.{layer}.mlp.experts.{expert}.up_proj",),
    "experts.down": ("layers.{layer}.mlp.experts.{expert}.down_proj",),
    "shared.gate": ("layers.{layer}.mlp.shared_experts.gate_proj",),
    "shared.up": ("layers.{layer}.mlp.shared_experts.up_proj",),
    "shared.down": ("layers.{layer}.mlp.shared_experts.down_proj",),
}
"""Part -> its module in the decoder, as most families have it."""

EXPERTS: Mapping[str, tuple[str, ...]] = {
    "experts.gate_up": ("layers.{layer}.mlp.experts.gate_up_proj",),
    "experts.down": ("layers.{layer}.mlp.experts.down_proj",),
}
"""What is fused -> its tensor in the decoder, as most families have it."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the tensors of a family are called.

    Attributes:
        decoder: part -> patterns of its module, in the decoder; or part and kind -> patterns of its tensor.
        prefixes: of the decoder, each of which stands before all of its names; transformers' own first.
        heads: names of the head.
        experts: what is fused -> patterns of its tensor, in the decoder; their biases have ``_bias`` behind it.
        ignored: patterns of tensors that are no part of the decoder, anywhere in a name.
        stacked: a part that is of several, one above the other -> these.
        neighbours: values of a head that turn together lie beside each other, and not half a head apart.
        interleaved: what is fused has inputs before outputs, and outputs of gate and up in turns.
        first: the number that the first layer has in names.
    """

    decoder: Mapping[str, tuple[str, ...]]
    prefixes: tuple[str, ...] = ("model.", "", "model.language_model.", "language_model.model.")
    heads: tuple[str, ...] = ("lm_head", "language_model.lm_head")
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: EXPERTS)
    ignored: tuple[str, ...] = (
        r"rotary_emb\.inv_freq$",  # older saves have them, and they follow from the config
        r"(^|\.)(vision_tower|vision_model|multi_modal_projector)\.",  # models of images and texts are given texts
        r"^(model\.)?mtp(_layers)?\.",  # layers behind the model's own, which a drafter reads
    )
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    neighbours: bool = False
    interleaved: bool = False
    first: int = 0

    def candidates(self, weight: Weight, prefix: str) -> Iterator[str]:
        """Names that a tensor may have in a checkpoint whose decoder has this prefix."""
        places = {"layer": None if weight.layer is None else self.first + weight.layer, "expert": weight.expert}
        if weight.part == "head":
            yield from (f"{head}.{weight.kind}" for head in self.heads)
        elif weight.part in FUSED and weight.expert is None:
            behind = "" if weight.kind == "weight" else f"_{weight.kind}"
            yield from (f"{prefix}{one.format(**places)}{behind}" for one in self.experts.get(weight.part, ()))
        else:
            modules, behind = self.decoder.get(f"{weight.part}.{weight.kind}", ()), ""
            if not modules:
                modules, behind = self.decoder.get(weight.part, ()), weight.kind and f".{weight.kind}"
            yield from (f"{prefix}{module.format(**places)}{behind}" for module in modules)

    def own(self, weight: Weight) -> str:
        """Transformers' name; of experts, of what is fused, and of what is stacked the whole's."""
        wholes = FUSED if weight.expert is not None else self.stacked
        if (whole := next((one for one, parts in wholes.items() if weight.part in parts), None)) is not None:
            weight = Weight(whole, weight.layer, kind=weight.kind)
        return next(self.candidates(weight, self.prefixes[0]))

    def fused_shape(self, whole: Weight, own: Experts, hidden: int) -> Shape:
        """Of what is fused of a layer's experts, or of its biases."""
        outputs, inputs = (hidden, own.width) if whole.part == "experts.down" else (2 * own.width, hidden)
        if whole.kind == "bias":
            return own.count, outputs
        return (own.count, inputs, outputs) if self.interleaved else (own.count, outputs, inputs)


def shapes_of(spec: DecoderSpec) -> dict[Weight, Shape]:
    """Every tensor of a decoder, with its shape; a tied head has none of its own."""
    found: dict[Weight, Shape] = {Weight("embedding"): (spec.vocab, spec.hidden)}
    found |= dict(_norm_shapes("norm", spec.head.norm, spec.hidden))
    if not spec.head.tied:
        found[Weight("head")] = (spec.vocab, spec.hidden)
    if spec.head.bias:
        found[Weight("head", kind="bias")] = (spec.vocab,)
    for number, layer in enumerate(spec.layers):
        found |= {weight._replace(layer=number): shape for weight, shape in _layer_shapes(layer, spec.hidden)}
    return found


def _norm_shapes(part: str, norm: Norm | None, hidden: int) -> Iterator[tuple[Weight, Shape]]:
    if norm is not None:
        yield from ((Weight(part, kind=kind), (hidden,)) for kind in ("weight", *(("bias",) if norm.bias else ())))


def _layer_shapes(layer: Layer, hidden: int) -> Iterator[tuple[Weight, Shape]]:
    mlp = layer.mlp
    for place, norms in (("before", layer.before), ("after", layer.after or ())):
        for part, norm in zip(("attention", "mlp"), norms, strict=False):
            yield from _norm_shapes(f"{place}.{part}", norm, hidden)
    yield from _attention(layer.mixer, hidden) if isinstance(layer.mixer, Attention) else _conv(layer.mixer, hidden)
    widths = (("gate", mlp.width, hidden), ("up", mlp.width, hidden), ("down", hidden, mlp.width))
    if isinstance(mlp, Experts):
        yield from _with_bias(Weight("experts.router"), (mlp.count, hidden), mlp.bias)
        for expert in range(mlp.count):
            for name, rows, size in widths:
                yield from _with_bias(Weight(f"experts.{name}", expert=expert), (rows, size), mlp.bias)
        if mlp.router:
            yield Weight("experts.router", kind=CHOICE), (mlp.count,)
        if mlp.shared:
            widths = (("gate", mlp.shared, hidden), ("up", mlp.shared, hidden), ("down", hidden, mlp.shared))
            yield from ((Weight(f"shared.{name}"), (rows, size)) for name, rows, size in widths)
        if mlp.shared_gate:
            yield Weight("shared.router"), (1, hidden)
        return
    for name, outputs, inputs in widths[isinstance(mlp, Plain) :]:
        yield from _with_bias(Weight(f"mlp.{name}"), (outputs, inputs), mlp.bias)


def _with_bias(weight: Weight, shape: Shape, bias: bool) -> Iterator[tuple[Weight, Shape]]:
    """A matrix, and its bias if it has one."""
    yield weight, shape
    if bias:
        yield weight._replace(kind="bias"), shape[:1]


def _attention(own: Attention, hidden: int) -> Iterator[tuple[Weight, Shape]]:
    queries, keys = own.heads * own.head_dim, own.kv_heads * own.head_dim
    sizes = (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries))
    for name, outputs, inputs in sizes:
        yield from _with_bias(Weight(f"attention.{name}"), (outputs, inputs), own.bias[name == "o"])
    for name, heads in (("q", own.heads), ("k", own.kv_heads)) if own.qk_norm else ():
        each = (heads, own.head_dim) if own.norms_own else (own.head_dim,)
        yield Weight(f"attention.{name}_norm"), (heads * own.head_dim,) if own.norms_all else each
    if own.sinks:
        yield Weight("attention.sinks", kind=""), (own.heads,)


def _conv(own: ShortConv, hidden: int) -> Iterator[tuple[Weight, Shape]]:
    shapes = {"in": (3 * hidden, hidden), "taps": (hidden, 1, own.width), "out": (hidden, hidden)}
    for name, shape in shapes.items():
        yield from _with_bias(Weight(f"conv.{name}"), shape, own.bias)
