"""DecoderSpec: what a decoder computes, layer by layer, without its weights.

Made of a model's settings by its family's function (:mod:`specdec.decoder.families`); executors compute what it says.
An executor names what it does not compute. Layers that are alike share one object, and parts are compared by value, so
that whoever keeps a table per kind of layer may have the part as its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.decoder.rope_scaling import RopeScaling

__all__ = [
    "Attention",
    "Clamp",
    "DecoderSpec",
    "Embedding",
    "Experts",
    "Gated",
    "Growth",
    "Head",
    "Layer",
    "Mixer",
    "Mlp",
    "Norm",
    "Plain",
    "Rope",
    "ShortConv",
    "Sigmoid",
    "UnknownDecoder",
]

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


class UnknownDecoder(Exception):
    """A model that no description covers; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of epsilon ``eps``, which multiplies by its weight and ``offset``.

    ``rounds_first``: half-precision values are rounded to their dtype before they are multiplied, too. ``centred``: the
    mean is taken off first (a layer norm). ``bias``: is added last.
    """

    eps: float
    offset: float = 0.0
    rounds_first: bool = False
    centred: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Growth:
    """Queries at position p multiplied by 1 + ``by`` log(1 + floor(p / ``every``)) (Llama 4, Ministral 3)."""

    by: float
    every: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a head's first ``dim`` values, or of none: halves turn by frequencies base^(-2i / dim)."""

    dim: int
    base: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with rotary positions.

    Attributes:
        heads, kv_heads: of queries; of keys and values.
        head_dim: of queries, keys and values.
        scale: of scores.
        rope: positions.
        window: a row sees keys less than ``window`` positions before it; None: all keys before it.
        cap: of scores, by a tanh; 0 for none.
        qk_norm: of queries and keys before they turn; None for none.
        norms_all: these are of all heads together, else of each head.
        bias: of queries, keys and values; of the output.
        norms_own: each head is multiplied by weights of its own when it is normed.
        norms_after: queries and keys are normed after they turned.
        sinks: each head has a score that no key has, and whose share of a row's attention adds nothing.
        growth: of queries with their positions; None for none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int | None = None
    cap: float = 0.0
    qk_norm: Norm | None = None
    norms_all: bool = False
    bias: tuple[bool, bool] = (False, False)
    norms_own: bool = False
    norms_after: bool = False
    sinks: bool = False
    growth: Growth | None = None


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated short convolution (LFM2): of b, c and x, which one product makes, c times the convolved b * x.

    Attributes:
        width: a channel of a row is made of its own and of those at the ``width`` - 1 positions before it.
        bias: of both products and of the convolution.
    """

    width: int
    bias: bool = False


Mixer = Attention | ShortConv


@dataclass(frozen=True, slots=True)
class Gated:
    """act(gate) * up, then down; ``width``: between."""

    act: Activation
    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Plain:
    """act(up), then down; ``width``: between."""

    act: Activation
    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """Experts are chosen by the sigmoid of a logit plus a bias; shares are without it (DeepSeek-V3, arXiv 2412.19437).

    Only those in the ``best`` of ``groups`` equal groups are, by the sum of each group's two largest. Shares are
    multiplied by ``scale``.
    """

    groups: int
    best: int
    scale: float


@dataclass(frozen=True, slots=True)
class Clamp:
    """In place of an activation: g * sigmoid(``gain`` g) (u + 1), of gate and up between bounds (GPT-OSS).

    Gates are at most ``limit``, and up is between -``limit`` and ``limit``.
    """

    gain: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs, of which each row has the ``chosen`` likeliest of ``count``.

    Attributes:
        act, width, count, chosen: as said.
        norm: the shares of a row's experts add up to one; else they are what the router says.
        router: what says how likely; None for the softmax of a logit for each.
        shared: width of one more, which each row has in full; 0 for none.
        shared_gate: the output of the shared MLP is multiplied by the sigmoid of a logit, one a row.
        bias: of the router and of each expert.
        clamp: in place of ``act``, in experts; None for none.
    """

    act: Activation
    width: int
    count: int
    chosen: int
    norm: bool
    router: Sigmoid | None = None
    shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    clamp: Clamp | None = None


Mlp = Gated | Plain | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer, whose mixer and MLP are added to the residual one after the other.

    Attributes:
        mixer: what brings tokens together; the part of a layer that plans and weights call attention.
        before: norms of what mixer and MLP read; None where one reads the residual as it is.
        after: norms of what they add; None for none.
        scale: of what they add.
        parallel: the MLP's input is the mixer's input; else it is the residual behind the mixer.
    """

    mixer: Mixer
    mlp: Mlp
    before: tuple[Norm | None, Norm | None]
    after: tuple[Norm, Norm] | None = None
    scale: float = 1.0
    parallel: bool = False

    @property
    def attention(self) -> Attention:
        """The mixer, of a layer that has attention."""
        assert isinstance(self.mixer, Attention)
        return self.mixer


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of a table, multiplied by ``scale`` in the model's dtype."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Head:
    """The last norm, and logits of what passed it.

    Attributes:
        norm: the last norm.
        tied: whether the embedding's table is the head's.
        cap: of logits, by a tanh; 0 for none.
        scale: of logits, before the cap.
        bias: whether the product that gives logits has one.
    """

    norm: Norm
    tied: bool
    cap: float = 0.0
    scale: float = 1.0
    bias: bool = False

    @property
    def is_product(self) -> bool:
        """Whether logits are a product's results, with its bias, as they are."""
        return self.cap == 0.0 and self.scale == 1.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder.

    Attributes:
        architecture: name of transformers' class, as fingerprints have it.
        vocab: tokens.
        hidden: width of the residual stream.
        context: longest text in tokens; where frequencies depend on the length, the length up to which they do not.
        layers: one entry for each; objects are shared.
        embedding, head: at both ends.
    """

    architecture: str
    vocab: int
    hidden: int
    context: int
    layers: tuple[Layer, ...]
    embedding: Embedding
    head: Head

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The kinds of rotary positions, each once."""
        return tuple(dict.fromkeys(own.rope for own in self.attentions))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Of the layers that have attention."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))
