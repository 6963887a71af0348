"""DecoderSpec: what a decoder computes, layer by layer, without its weights.

Made of a model's settings by its family's function (:mod:`specdec.decoder.families`); executors compute what it says.
An executor names what it does not compute. Layers that are alike share one object, and parts are compared by value, so
that whoever keeps a table per kind of layer may have the part as its key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Attention",
    "DecoderSpec",
    "Dynamic",
    "Embedding",
    "Experts",
    "Gated",
    "Head",
    "Layer",
    "Linear",
    "Llama3",
    "LongRope",
    "Mlp",
    "Norm",
    "Plain",
    "Rope",
    "RopeScaling",
    "UnknownDecoder",
    "Yarn",
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
class Linear:
    """Frequencies divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Another base for texts beyond ``trained`` tokens; below, the base as it is but for rounding by ``factor``."""

    factor: float
    trained: int


@dataclass(frozen=True, slots=True)
class Llama3:
    """Low frequencies divided by ``factor``, high ones as they are (Llama 3.1).

    ``low``, ``high``: a frequency is low or high that turns fewer or more often than so in ``trained`` tokens.
    """

    factor: float
    low: float
    high: float
    trained: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Low frequencies divided by ``factor``, high ones as they are (Peng et al. 2023, YaRN, arXiv 2309.00071).

    ``fast``, ``slow``: turns in ``trained`` tokens, from which on a frequency is high, and up to which it is low.
    ``whole``: the bounds between are rounded to whole dimensions. Cosines and sines are multiplied by ``attention``.
    """

    factor: float
    trained: int
    fast: float
    slow: float
    whole: bool
    attention: float


@dataclass(frozen=True, slots=True)
class LongRope:
    """Each frequency divided by its own of ``factors`` (Ding et al. 2024, LongRoPE, arXiv 2402.13753).

    Cosines and sines are multiplied by ``attention``.
    """

    factors: tuple[float, ...]
    attention: float


RopeScaling = Linear | Dynamic | Llama3 | Yarn | LongRope


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of the first ``dim`` values of a head: its halves turn by frequencies base^(-2i / dim)."""

    dim: int
    base: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention, with rotary positions or none.

    Attributes:
        heads, kv_heads: of queries; of keys and values.
        head_dim: of queries, keys and values.
        scale: of scores.
        rope: positions; None for none.
        window: a row sees keys less than ``window`` positions before it; None: all keys before it.
        cap: of scores, by a tanh; 0 for none.
        qk_norm: of queries and keys before they turn; None for none.
        norms_all: these are of all heads together, else of each head.
        bias: of queries, keys and values; of the output.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    window: int | None = None
    cap: float = 0.0
    qk_norm: Norm | None = None
    norms_all: bool = False
    bias: tuple[bool, bool] = (False, False)


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
class Experts:
    """Gated MLPs without biases, of which each row has the ``chosen`` likeliest of ``count``.

    A router's softmax says how likely. ``norm``: the shares of a row's experts add up to one, else those of all do.
    """

    act: Activation
    width: int
    count: int
    chosen: int
    norm: bool


Mlp = Gated | Plain | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer, whose attention and MLP are added to the residual one after the other.

    Attributes:
        before: norms of what attention and the MLP read; None where one reads the residual as it is.
        after: norms of what they add; None for none.
        scale: of what they add.
        parallel: the MLP reads what attention reads, and nothing of what attention adds.
    """

    attention: Attention
    mlp: Mlp
    before: tuple[Norm | None, Norm | None]
    after: tuple[Norm, Norm] | None = None
    scale: float = 1.0
    parallel: bool = False


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
    """

    norm: Norm
    tied: bool
    cap: float = 0.0
    scale: float = 1.0

    @property
    def is_product(self) -> bool:
        """Whether logits are a product's results as they are."""
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
        every = (layer.attention.rope for layer in self.layers)
        return tuple(dict.fromkeys(rope for rope in every if rope is not None))
