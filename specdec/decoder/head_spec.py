"""HeadSpec: what a head computes that drafts from a target's hidden states, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.decoder.spec import Layer, Norm

__all__ = ["HeadSpec"]


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head: a few decoder layers between what the target gives and logits.

    Attributes:
        layers: one entry for each; objects are shared.
        width: W, of its residual stream.
        fuse: what makes a state of the target's hidden states: ``fc``, a product; ``none``, the one that is read is
            the state. ``join``: a product of an embedding and a state makes the stream.
        input_norms: of what ``fc`` or ``join`` reads, side by side: of each part, or one of all; empty for none.
        fused_norm: of what ``fc`` gives; None for none.
        joined_first: norms of an embedding and of a state, which the first layer's queries, keys and values read side
            by side; None where they read the stream.
        residual: what the first layer adds to: the ``hidden`` state, the state ``normed`` by ``joined_first``, or what
            is ``joined``.
        onward: the state that the next row reads: the ``stream`` behind the layers, or what the last norm gives.
        norm: the last norm; None for none.
    """

    layers: tuple[Layer, ...]
    width: int
    fuse: Literal["none", "fc", "join"]
    input_norms: tuple[Norm, ...] = ()
    fused_norm: Norm | None = None
    joined_first: tuple[Norm, Norm] | None = None
    residual: Literal["hidden", "normed", "joined"] = "hidden"
    onward: Literal["stream", "normed"] = "stream"
    norm: Norm | None = None
